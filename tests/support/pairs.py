"""Where the healthy pair of the tests lies."""

from eagle_trace.demo import models_dir

TARGET = models_dir() / "target"
DRAFT = models_dir() / "draft"
