"""What `scripts/bench.py` and `scripts/gpu_check.py` are made of."""
