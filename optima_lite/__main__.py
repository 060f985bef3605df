"""`python -m optima_lite` is the same program as `optima-lite`."""

from optima_lite.cli.main import main

if __name__ == "__main__":
    main()
