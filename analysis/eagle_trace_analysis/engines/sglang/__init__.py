"""SGLang: what it loads, takes, ignores and refuses. The names of `eagle_trace_analysis.engines.base.Engine`."""

from eagle_trace_analysis.engines.sglang.accepts import config_class, positions, refusals, repaired, target_refusals
from eagle_trace_analysis.engines.sglang.classes import other_class
from eagle_trace_analysis.engines.sglang.engine import (
    ARCHITECTURE,
    ARCHITECTURES,
    ENGINE,
    FAMILY,
    LAYER,
    LAYER_SIZES,
    MODEL_TYPE,
    NAME,
    OTHER_NAMES,
    READS,
    REPLACES_EMBEDDING,
    STACKED,
    TITLE,
    attention_words,
    canonical_name,
    captured_inputs,
    computes_nothing,
    copied_from_serving,
    copied_from_training,
    default_inputs,
    destinations,
    entering_norm,
    fc_norm,
    fed_width,
    ids_that_capture,
    last_input,
    layer_ids,
    layer_of,
    norm_before_fc,
    num_aux_hidden_states,
    parameters,
    rope_settings,
    rotation_fault,
    skips_fc,
    uses_aux_hidden_state,
    with_defaults,
)
from eagle_trace_analysis.engines.sglang.gaps import gaps
from eagle_trace_analysis.engines.sglang.kinds import loads_kind, serves_kind
from eagle_trace_analysis.engines.sglang.schemes import SIDE_FILES, quantisation_refused, read_quantisation, scheme_of
from eagle_trace_analysis.engines.sglang.target_classes import (
    feeds_since,
    is_known_target,
    target_class,
    why_it_cannot_serve,
)
from eagle_trace_analysis.engines.sglang.words import WORDS, ids_unread
from eagle_trace_analysis.engines.sglang.written import flat_config
