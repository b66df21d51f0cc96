"""``python -m distaccum.train``: the main job."""

from distaccum.train.cli import main

if __name__ == "__main__":
    main()
