"""Fine-tune over ranks, save with torch.distributed.checkpoint, and continue on one rank.

    torchrun --nproc-per-node 2 examples/finetune_ranks.py /tmp/checkpoint

Each rank trains on its own batches. `fully_shard` (FSDP2) cuts every parameter but the experts,
which the ranks share out (expert parallelism): tokens travel to their experts and back. The
checkpoint has no ranks. One rank then loads it, writes the text of the ranks, and continues with
the same optimizer.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_ops
from moe_ops.demo import MODEL
from moe_ops.training import clip_grad_norm_, sharded_state_dict

PROMPT, NEW_TOKENS = "If the file", 24
STEPS, BATCH, CONTEXT, RATE = 8, 4, 64, 5e-4


class Block(nn.Module):
    """The router of a transformers block, and its experts as a layer over ranks."""

    def __init__(self, block, config, **options):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate.weight = block.gate.weight
        self.experts = moe_ops.FusedMoE(
            config.num_experts, config.num_experts_per_tok, config.hidden_size,
            config.moe_intermediate_size, renormalize=config.norm_topk_prob,
            params_dtype=torch.float32, device=block.gate.weight.device, **options,
        )  # fmt: skip
        names = ("gate_up_proj", "down_proj")
        weights = {f"experts.{name}": getattr(block.experts, name).data for name in names}
        moe_ops.load_checkpoint(self.experts, weights, progress=False)

    def forward(self, hidden_states):
        return self.experts(hidden_states, self.gate(hidden_states))


def model_of(device, **options):
    """The demo's model in float32, with its experts on this rank and others."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device)
    for layer in model.model.layers:
        layer.mlp = Block(layer.mlp, model.config, **options)
    return model.train()


def over_ranks(device):
    """The demo's model with its experts on all ranks, and the rest cut by FSDP2."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = model_of(
        device, dp_size=ranks, dp_rank=rank, ep_size=ranks, max_num_tokens=BATCH * CONTEXT
    )
    experts = {x for layer in model.model.layers for x in layer.mlp.experts.parameters()}
    fully_shard(model, mesh=init_device_mesh(device.type, (ranks,)), ignored_params=experts)
    for x in experts:  # their gradients are sums over the ranks' losses, those of the others means
        x.register_hook(lambda grad: grad / ranks)
    return model


def optimizer_of(model):
    """AdamW, with the experts in a group of their own.

    On GPUs it updates the tensors of a group together, which must then all be cut by FSDP2 or none.
    """
    groups = {True: [], False: []}
    for name, x in model.named_parameters():
        groups[".experts." in name].append(x)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], RATE)


def step(model, optimizer, ids):
    """Train on the ``ids`` of this rank."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def mean(x):
    """The mean over the ranks."""
    dist.all_reduce(x)
    return x / dist.get_world_size()


def states_of(model, optimizer):
    """What a checkpoint has, and the optimizer's state as `set_optimizer_state_dict` takes it."""
    state = get_optimizer_state_dict(model, optimizer)
    placed = sharded_state_dict(model, state)
    return {"model": get_model_state_dict(model), "optimizer": placed}, state


def load(model, optimizer, folder):
    """Load what any number of ranks has saved."""
    states, optimizer_state = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"])
    set_optimizer_state_dict(model, optimizer, optimizer_state)


def text_of(model, prompt):
    with torch.no_grad():
        ids = model.eval().generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    model.train()
    return ids


def main(device, folder):
    """Run on the ranks of a group that is initialized."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids.to(device)
    g = torch.Generator().manual_seed(0)
    batches = torch.randint(2048, (STEPS + 1, ranks * BATCH, CONTEXT), generator=g).to(device)
    model = over_ranks(device)
    optimizer = optimizer_of(model)
    for batch in batches[:-1]:
        loss, norm = step(model, optimizer, batch.chunk(ranks)[rank])
    loss = mean(loss)
    if rank == 0:
        print(f"after {STEPS} steps over {ranks} ranks: loss {loss:.3f}, gradient {norm:.3f}")
    states, _ = states_of(model, optimizer)
    dcp.save(states, checkpoint_id=folder)
    text = text_of(model, prompt)

    alone = model_of(device)
    again = optimizer_of(alone)
    load(alone, again, folder)
    if not torch.equal(text_of(alone, prompt), text):
        raise RuntimeError("one rank must write the text of the ranks, got another one")
    for _ in range(2):  # the optimizer goes on, too
        loss, norm = step(model, optimizer, batches[-1].chunk(ranks)[rank])
        expected, expected_norm = step(alone, again, batches[-1])
        torch.testing.assert_close((mean(loss), norm), (expected, expected_norm), rtol=1e-4, atol=0)
    print(f"rank {rank}: one rank goes on as the ranks do: {tokenizer.decode(text[0])!r}")


if __name__ == "__main__":
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    main(torch.device("cuda", local) if on_gpus else torch.device("cpu"), sys.argv[1])
    dist.destroy_process_group()
