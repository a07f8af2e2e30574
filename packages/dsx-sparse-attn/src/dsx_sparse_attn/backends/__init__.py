"""The implementations of attention. Each module has `refusals(call)`, `forward(call)` and `backward(call, ...)`."""
