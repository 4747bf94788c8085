"""The same network, weights and batches in other frameworks, each in a process of its own.

`jobs` writes a job directory and starts runners on it; ``runners/`` are scripts that each know one framework, share
`runners/protocol.py` and `runners/convert.py`, and import nothing of cnnjax (but for the one of cnnjax itself).
"""
