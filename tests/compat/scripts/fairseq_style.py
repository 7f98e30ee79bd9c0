"""A trainer for FP16 models around an Adam that inherits from apex's and has a step of its own."""

import argparse
import math

import torch
import torch.nn as nn

try:
    from apex import amp
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    has_apex = multi_tensor_applier.available
except ImportError:
    has_apex = False

parser = argparse.ArgumentParser()
parser.add_argument("--no-apex", action="store_true")
parser.add_argument("--fp16", action="store_true", help="an FP16 model, scaled by this program")
parser.add_argument("--deprecated-fused-adam", action="store_true")
parser.add_argument("--opt-level", default="", help="amp's, instead")


class MemoryEfficientAdam(FusedAdam if has_apex else torch.optim.Adam):
    """Half parameters: FP32 copies and moments in the state, and gradients that are cast."""

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists, copies = [[], [], [], []], []
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p.data, dtype=torch.float)
                    state["exp_avg_sq"] = torch.zeros_like(p.data, dtype=torch.float)
                    if p.dtype != torch.float:
                        state["copy"] = p.data.float()
                exact = state.get("copy", p.data)
                tensors = (p.grad.data.float(), exact, state["exp_avg"], state["exp_avg_sq"])
                for tensor, tensors_of_kind in zip(tensors, lists):
                    tensors_of_kind.append(tensor)
                copies.append((p, exact))
            beta1, beta2 = group["betas"]
            multi_tensor_applier(
                self.multi_tensor_adam,
                self._dummy_overflow_buf,
                lists,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )
            for p, exact in copies:
                p.data.copy_(exact)
        return loss


class FusedAdamV1(torch.optim.Optimizer):
    """Around apex's old extension, which writes the half parameters too."""

    def __init__(self, params, lr, betas, weight_decay, eps=1e-8):
        global fused_adam_cuda
        import fused_adam_cuda
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, eps=eps))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p_data_fp32 = p.data.float()
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p_data_fp32)
                    state["exp_avg_sq"] = torch.zeros_like(p_data_fp32)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                fused_adam_cuda.adam(
                    p_data_fp32, p.data, state["exp_avg"], state["exp_avg_sq"], p.grad.data,
                    group["lr"], beta1, beta2, group["eps"], 1.0, state["step"], 1, 1,
                    group["weight_decay"],
                )


class Scaler:
    """Dynamic loss scaling of the trainer's own."""

    def __init__(self, scale):
        self.scale, self.clean_steps = scale, 0

    def unscale(self, params, clip_norm):
        """The gradients, unscaled and clipped; False after an overflow, which lowers the scale."""
        grads = [p.grad for p in params if p.grad is not None]
        norm = math.sqrt(sum(g.float().pow(2).sum().item() for g in grads)) / self.scale
        if not math.isfinite(norm):
            self.scale, self.clean_steps = self.scale / 2, 0
            return False
        for g in grads:
            g.mul_(min(1, clip_norm / (norm + 1e-6)) / self.scale)
        self.clean_steps += 1
        if self.clean_steps % 16 == 0:
            self.scale *= 2
        return True


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.fc1 = nn.Linear(16, 24)
        self.fc2 = nn.Linear(24, 4)

    def forward(self, tokens):
        return self.fc2(torch.relu(self.fc1(self.embed(tokens).sum(1))))


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(8):
        tokens = torch.randint(32, (32, 6), generator=generator)
        yield tokens, tokens.sum(1) // 24 % 4


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier()
    if args.fp16:
        model.half()
    options = {"lr": 0.02, "betas": (0.9, 0.98), "weight_decay": 0.01}
    if args.no_apex:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    elif args.deprecated_fused_adam:
        optimizer = FusedAdamV1(model.parameters(), **options)
    else:
        optimizer = MemoryEfficientAdam(model.parameters(), **options)
    if args.opt_level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    scaler = Scaler(2.0**10 if args.fp16 else 1.0)

    for epoch in range(5):
        for tokens, target in batches(epoch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).float(), target)
            if args.opt_level:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                continue
            (loss * scaler.scale).backward()
            if scaler.unscale(list(model.parameters()), 1.0):
                optimizer.step()

    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(x).float(), y).item() for x, y in batches(1000)
        ]
    print("final loss: %.6f" % (sum(losses) / len(losses)))


if __name__ == "__main__":
    main()
