"""What the nodes of the portable graphs say of themselves: keys and values of their ONNX metadata_props.

Export writes them, and passes over the graphs look nodes up by them. A role is the part of the model that a node
belongs to, spelled as the module that made it: "embed", "norm", "head", "rotary.full", and within a layer
"attention.project", "attention.query_norm", "mlp.gate_up", "post_mlp_norm" and so on. The modules of
``export/model`` are the list. A role is not unique: a module may make several nodes, every layer has it again, and
so has every draft step of an assistant.
"""

ROLE = "slipstream.role"
LAYER = "slipstream.layer"  # the index of the layer, on its nodes
LAYER_TYPE = "slipstream.layer_type"  # "sliding" or "full", on its nodes
WINDOW = "slipstream.window"  # rows that are seen, on the attention of a sliding layer

HEAD = "head"
EMBEDDING = "embed"
SHARED_ATTENTION = "shared_attention"  # over KV that another layer writes, or the target
CACHED_ATTENTION = "cached_attention"  # over KV that its own layer writes
GATE_UP = "mlp.gate_up"
LAYER_SCALAR = "scalar"  # the product at the end of a layer
EXPERTS = "experts"
EXPERTS_INPUTS = ("rows", "chosen", "shares", "gate_up", "down")  # "experts.rows" is the gather of it, and so on
