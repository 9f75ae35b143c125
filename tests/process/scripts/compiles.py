"""``torch.compile`` of a small model gives what eager mode gives."""

import torch


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    data = torch.randn(3, 4)
    compiled = torch.compile(model)
    loss = compiled(data).sum()
    loss.backward()
    torch.testing.assert_close(compiled(data), model(data))
    print("compiled", flush=True)


if __name__ == "__main__":
    main()
