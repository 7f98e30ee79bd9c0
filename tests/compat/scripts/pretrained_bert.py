"""Fine-tuning of 2019: a half model, FusedAdam in two groups within FP16_Optimizer, a warm-up."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--loss_scale", type=float, default=0, help="0 (default value): dynamic")
parser.add_argument("--contrib", action="store_true", help="where FP16_Optimizer went later")
parser.add_argument("--max_grad_norm", type=float, default=1.0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", default="")
parser.add_argument("--resume", default="")

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    BertLayerNorm = nn.LayerNorm


def warmup_linear(progress, warmup=0.1):
    return progress / warmup if progress < warmup else max(0.0, 1.0 - progress)


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = BertLayerNorm(hidden, eps=1e-12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        attention = F.softmax(q @ k.transpose(1, 2) / q.size(-1) ** 0.5, dim=-1)
        return self.LayerNorm(x + self.dense(attention @ v))


class BertForSequenceClassification(nn.Module):
    def __init__(self, vocab=24, hidden=16, num_labels=3):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, hidden)
        self.encoder = nn.ModuleList([Layer(hidden) for _ in range(2)])
        self.classifier = nn.Linear(hidden, num_labels)

    def forward(self, input_ids, labels):
        x = self.embeddings(input_ids)
        for layer in self.encoder:
            x = layer(x)
        return F.cross_entropy(self.classifier(x[:, 0]), labels)


class BertAdam(torch.optim.Optimizer):
    """Moments as they are, decoupled decay, each group's gradients clipped."""

    def __init__(self, params, lr, max_grad_norm):
        super().__init__(params, dict(lr=lr, max_grad_norm=max_grad_norm))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group['params'], group['max_grad_norm'])
            for p in group['params']:
                state = self.state[p]
                m = state.setdefault('next_m', torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=0.1)
                v = state.setdefault('next_v', torch.zeros_like(p))
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.sub_(group['lr'] * (m / (v.sqrt() + 1e-8) + group['weight_decay'] * p))


def batches(seed, count=8):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(24, (32, 8), generator=generator)
        yield ids, ids[:, 0] % 3


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    model = BertForSequenceClassification()
    if args.fp16:
        model.half()
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {'params': [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], 'weight_decay': 0.01},
        {'params': [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], 'weight_decay': 0.0}
    ]
    learning_rate = 2e-2
    if args.fp16:
        if args.contrib:
            from apex.contrib.optimizers import FP16_Optimizer
        else:
            from apex.optimizers import FP16_Optimizer
        from apex.optimizers import FusedAdam
        optimizer = FusedAdam(optimizer_grouped_parameters, lr=learning_rate, bias_correction=False,
                              max_grad_norm=args.max_grad_norm)
        if args.loss_scale == 0:
            optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        else:
            optimizer = FP16_Optimizer(optimizer, static_loss_scale=args.loss_scale)
    else:
        optimizer = BertAdam(optimizer_grouped_parameters, learning_rate, args.max_grad_norm)

    global_step = first_epoch = 0
    if args.resume:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        global_step, first_epoch = saved["global_step"], saved["epoch"]
        if args.fp16:
            assert optimizer.cur_scale == saved["optimizer"]["cur_scale"]
    for epoch in range(first_epoch, args.epochs):
        for input_ids, labels in batches(epoch):
            loss = model(input_ids, labels)
            if args.fp16:
                optimizer.backward(loss)
            else:
                loss.backward()
            lr_this_step = learning_rate * warmup_linear(global_step / 32)
            for param_group in optimizer.param_groups:
                param_group['lr'] = lr_this_step
            optimizer.step()
            optimizer.zero_grad()
            global_step += 1

    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "global_step": global_step, "epoch": args.epochs}, args.save)
    with torch.no_grad():
        losses = [model(*batch).float().item() for batch in batches(1000)]
    print("final loss: %.6f" % (sum(losses) / len(losses)))


if __name__ == "__main__":
    main()
