"""Throw-away: exchange times by number of programs and warps."""

import os, sys, json, torch, torch.multiprocessing as mp, tempfile
from moe_ops.bench import ranks as R
import moe_ops.kernels.symmetric as K
import torch.distributed as dist, moe_ops


def run(number, store, out):
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{store}", rank=number, world_size=2)
    base_warps, base_programs = K._warps, K.programs_of
    rank = R.Rank(number, 2, device, R._barrier(2, device))
    rank.barrier()
    res = []
    cfg = {s: moe_ops.FusedMoEQuantConfig(s) for s in ("unquantized", "fp8_block128")}
    for H, k in ((2048, 8), (7168, 8), (4096, 2)):
        ex = moe_ops.SymmetricPrepareAndFinalize(
            None,
            4096,
            H,
            k,
            dtype=torch.bfloat16,
            expert_ranks=(torch.arange(128) // 64).int(),
            equal_num_tokens=True,
        )
        ex.connect(device)
        ag = moe_ops.AllGatherPrepareAndFinalize(None, 4096, equal_num_tokens=True)
        for M in (1, 8, 64, 128, 512, 4096):
            x = torch.randn(M, H, device=device).bfloat16()
            ids = torch.rand(M, 128, device=device).topk(k, 1).indices.int()
            w = torch.rand(M, k, device=device)
            for name, c in cfg.items():
                for progs in (M,) if M < 64 else (32, 64, 132, 264):
                    for wf in (1, 2):
                        K.programs_of = lambda rows, p=progs: max(1, min(rows, p))
                        K._warps = lambda width, f=wf: max(
                            1, min(16, K.next_power_of_2(width) // 512 // f)
                        )
                        K._send_launch.cache_clear()
                        K._return_launch.cache_clear()
                        given = (x, w, ids, 128, None, False, c)
                        p = ex.prepare(*given)
                        sums = torch.randn(2 * M, H, device=device).bfloat16()

                        def chain(step):
                            def steps():
                                for _ in range(20):
                                    step()

                            return R._slowest(R._time(steps, rank), rank) / 20

                        a = chain(lambda: ex.prepare(*given))
                        b = (
                            chain(lambda: ex.send_back(sums, p.topk_ids)())
                            if name == "unquantized"
                            else 0
                        )
                        res.append((H, M, name, progs, wf, round(a, 1), round(b, 1)))
                        if number == 0:
                            print(res[-1], flush=True)
                K.programs_of, K._warps = base_programs, base_warps
                if M in (8, 512, 4096):
                    p = ag.prepare(*given)
                    a = chain(lambda: ag.prepare(*given))
                    b = chain(lambda: ag.send_back(sums, p.topk_ids)())
                    if number == 0:
                        print("NCCL", H, M, name, round(a, 1), round(b, 1), flush=True)
    if number == 0:
        json.dump(res, open(out + "/programs.json", "w"))
    dist.destroy_process_group()


if __name__ == "__main__":
    R.REPLAYS, R.WARM_UPS = 12, 3
    with tempfile.TemporaryDirectory() as f:
        mp.spawn(run, (f + "/s", os.environ["OUT"]), nprocs=2)
