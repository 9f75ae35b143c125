"""``python -m elasticlib``: the same command line as `elasticrun`."""

from elasticlib.run import main

if __name__ == "__main__":
    main()
