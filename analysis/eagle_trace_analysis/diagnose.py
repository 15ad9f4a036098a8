"""Where `diagnosed` was before it was a name of `eagle_trace_analysis`: notebooks import it from here."""

from eagle_trace_analysis.diagnosis.diagnose import Checkpoints, Diagnosis, diagnose, diagnosed

__all__ = ["Checkpoints", "Diagnosis", "diagnose", "diagnosed"]
