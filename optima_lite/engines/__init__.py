"""Engines: whatever can say a turn. base.py is the protocol; the others import on demand."""
