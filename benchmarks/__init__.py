"""Benchmarks: ``python -m benchmarks run --suite quick``, then ``table`` and ``plot`` on the JSON it wrote."""
