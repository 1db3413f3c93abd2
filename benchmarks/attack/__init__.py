"""An attack on the command line and the library as a black box: `make attack`, see `benchmarks/attack/__main__.py`."""
