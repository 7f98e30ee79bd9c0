"""A trainer with a copy of apex's old FusedAdam, around its extension, and either FP16_Optimizer."""

import argparse
import inspect

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--optim", default="fusedadam")
parser.add_argument("--model_dtype", default="fp32")
parser.add_argument("--loss_scale", type=float, default=0)
parser.add_argument("--contrib", action="store_true")
parser.add_argument("--copy_max_grad_norm", type=float, default=0.0)
parser.add_argument("--accum_count", type=int, default=2)
parser.add_argument("--train_steps", type=int, default=40)
parser.add_argument("--save_model", default="")
parser.add_argument("--train_from", default="")


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                 eps_inside_sqrt=False, weight_decay=0.0, max_grad_norm=0.0):
        global fused_adam_cuda
        import fused_adam_cuda
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                        weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        super(FusedAdam, self).__init__(params, defaults)
        self.eps_mode = 0 if eps_inside_sqrt else 1

    def step(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None):
        loss = closure() if closure is not None else None
        grads_group = [None] * len(self.param_groups) if grads is None else grads
        if grad_norms is None:
            grad_norms = [None] * len(self.param_groups)
        for group, grads_this_group, grad_norm in zip(self.param_groups, grads_group, grad_norms):
            if grads_this_group is None:
                grads_this_group = [None] * len(group["params"])
            combined_scale = scale
            if group["max_grad_norm"] > 0:
                clip = ((grad_norm / scale) + 1e-6) / group["max_grad_norm"]
                if clip > 1:
                    combined_scale = clip * scale
            for p, grad in zip(group["params"], grads_this_group):
                if p.grad is None and grad is None:
                    continue
                if grad is None:
                    grad = p.grad.data
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                out_p = torch.tensor([], dtype=torch.float)
                fused_adam_cuda.adam(p.data, out_p, state["exp_avg"], state["exp_avg_sq"], grad,
                                     group["lr"], beta1, beta2, group["eps"], combined_scale,
                                     state["step"], self.eps_mode,
                                     1 if group["bias_correction"] else 0, group["weight_decay"])
        return loss


def build_torch_optimizer(model, opt):
    params = [p for p in model.parameters() if p.requires_grad]
    if opt.optim == "adam":
        return torch.optim.Adam(params, lr=0.02, betas=(0.9, 0.998))
    optimizer = FusedAdam(params, lr=0.02, betas=(0.9, 0.998), max_grad_norm=opt.copy_max_grad_norm)
    if opt.model_dtype == "fp16":
        import apex

        package = apex.contrib.optimizers if opt.contrib else apex.fp16_utils
        optimizer = package.FP16_Optimizer(optimizer, static_loss_scale=opt.loss_scale,
                            dynamic_loss_scale=opt.loss_scale == 0)
    return optimizer


class Optimizer(object):
    def __init__(self, optimizer, fp16, max_grad_norm):
        self._optimizer, self._fp16, self._max_grad_norm = optimizer, fp16, max_grad_norm
        self._training_step = 1

    def state_dict(self):
        return {"training_step": self._training_step, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self._training_step = state_dict["training_step"]
        self._optimizer.load_state_dict(state_dict["optimizer"])

    def backward(self, loss):
        if self._fp16 == "legacy":
            kwargs = {}
            if "update_master_grads" in inspect.getfullargspec(self._optimizer.backward).args:
                kwargs["update_master_grads"] = True
            self._optimizer.backward(loss, **kwargs)
        else:
            loss.backward()

    def step(self):
        if self._fp16 == "legacy":
            if hasattr(self._optimizer, "update_master_grads"):
                self._optimizer.update_master_grads()
            if hasattr(self._optimizer, "clip_master_grads") and self._max_grad_norm > 0:
                self._optimizer.clip_master_grads(self._max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, self._training_step / 8)
            if self._fp16 is None and self._max_grad_norm > 0:
                clip_grad_norm_(group["params"], self._max_grad_norm)
        self._optimizer.step()
        self._training_step += 1


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(20, (32, 6), generator=generator)
    return src, src.flip(1)


def main():
    opt = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 24), nn.Flatten(), nn.Linear(144, 64), nn.ReLU(),
                          nn.Linear(64, 120))
    if opt.model_dtype == "fp16":
        model.half()
    fp16 = "legacy" if opt.model_dtype == "fp16" else None
    optim = Optimizer(build_torch_optimizer(model, opt), fp16, max_grad_norm=1.0)
    if opt.train_from:
        checkpoint = torch.load(opt.train_from)
        model.load_state_dict(checkpoint["model"])
        optim.load_state_dict(checkpoint["optim"])

    def compute_loss(seed):
        src, tgt = batch(seed)
        scores = model(src).float().view(-1, 20)
        return nn.functional.cross_entropy(scores, tgt.reshape(-1))

    while optim._training_step <= opt.train_steps:
        optim._optimizer.zero_grad()
        for k in range(opt.accum_count):
            optim.backward(compute_loss(optim._training_step * opt.accum_count + k) / opt.accum_count)
        # a look at the gradients, as reports have it
        norms = [p.grad.float().norm().item() for p in model.parameters()]
        assert len(norms) == 5
        optim.step()
    if opt.save_model:
        torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, opt.save_model)
    with torch.no_grad():
        print("final loss: %.6f" % compute_loss(10**6).item())


if __name__ == "__main__":
    main()
