"""Problems for Hopper's own kernels."""

SCHEMES = (
    "unquantized", "fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block128",
    "int8_tensor", "int8_channel", "int8_block128",
)  # fmt: skip
CASES = [
    ("packed", 64, {"num_tokens": 700, "num_experts": 4, "top_k": 2}),
    ("packed", 64, {"num_tokens": 700, "num_experts": 4, "top_k": 2, "routing": "holes"}),
    ("fetched", 128, {"num_tokens": 1200, "num_experts": 4, "top_k": 2, "routing": "one_expert"}),
    ("fetched", 128, {"num_tokens": 1201, "num_experts": 4, "top_k": 2, "routing": "skewed"}),
    ("stream", 16, {"num_tokens": 1, "num_experts": 8, "top_k": 4}),
    ("stream", 16, {"num_tokens": 9, "num_experts": 4, "top_k": 2, "routing": "holes"}),
    ("stream", 16, {"num_tokens": 40, "num_experts": 8, "top_k": 2, "routing": "one_expert"}),
    ("stream", 32, {"num_tokens": 50, "num_experts": 8, "top_k": 3, "routing": "skewed"}),
    ("stream", 32, {"num_tokens": 100, "num_experts": 8, "top_k": 2, "routing": "duplicates"}),
]
