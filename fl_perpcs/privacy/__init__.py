"""Privacy: what protects those who share.

============  ===============================================================================
dp_sgd        differentially private training of adapters and gates, one ε for both
============  ===============================================================================
"""
