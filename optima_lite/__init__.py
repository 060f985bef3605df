"""optima-lite: train teams of LLM agents to talk less and answer better (arXiv:2410.08115)."""

__version__ = "0.1.0"
