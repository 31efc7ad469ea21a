"""Personalized Pieces (Per-Pcs) as a federated-learning simulation on Flower."""

__version__ = "0.1.0"
