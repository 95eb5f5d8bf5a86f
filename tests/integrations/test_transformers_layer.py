"""A transformers model that holds the layer itself: saved, and read by `from_pretrained`."""

import pytest
import torch
from loaded_layers import SECOND_OF_TWO, E, H, batch, loaded, make

import moe_ops

transformers = pytest.importorskip("transformers")


class Config(transformers.PretrainedConfig):
    model_type = "moe_ops_test"

    def __init__(self, options=None, scheme=None, **rest):
        self.options, self.scheme = options or {}, scheme
        super().__init__(**rest)


class Model(transformers.PreTrainedModel):
    config_class = Config
    base_model_prefix = ""

    def __init__(self, config):
        super().__init__(config)
        self.router = torch.nn.Linear(H, E, bias=False)
        self.experts = make(config.scheme, **config.options)
        self.post_init()

    def forward(self, x):
        return self.experts(x, self.router(x))


class ModelThatResets(Model):
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, moe_ops.FusedMoE):
            module.reset_parameters()


@pytest.mark.parametrize("kind", [Model, ModelThatResets])
@pytest.mark.parametrize("options", [{}, SECOND_OF_TWO], ids=["one", "ep"])
@pytest.mark.parametrize("scheme", [None, "fp8_block32", "int4_w4a16_g32"])
def test_from_pretrained(kind, options, scheme, tmp_path):
    model = kind(Config(options, scheme)).eval()
    loaded(model.experts, scheme)
    model.save_pretrained(tmp_path)
    read, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    tensors = (dict((*m.named_parameters(), *m.named_buffers())) for m in (read, model))
    for x, y in zip(*(t.values() for t in tensors), strict=True):
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    x = batch()[0]
    with torch.no_grad():  # memory of a file is aligned otherwise, and BLAS sums otherwise then
        torch.testing.assert_close(read(x), model(x))
    loader = read.experts.w13_weight.weight_loader
    assert loader.layer is read.experts


def test_from_pretrained_without_the_experts(tmp_path):
    """What a checkpoint lacks is reset, and the layer is then loaded by itself."""
    model = ModelThatResets(Config(SECOND_OF_TWO))
    state = {k: v for k, v in model.state_dict().items() if "experts" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    read = ModelThatResets.from_pretrained(tmp_path)
    assert all(p.any() and p.requires_grad for p in read.experts.parameters())
    loaded(read.experts), loaded(model.experts)
    assert read.experts.expert_map.tolist() == model.experts.expert_map.tolist()
    with torch.no_grad():
        torch.testing.assert_close(read(batch()[0]), model(batch()[0]))
