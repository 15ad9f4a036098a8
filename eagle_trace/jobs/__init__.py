"""The main job as one command: check a draft, record it where it is served, replay it where it was trained, compare."""
