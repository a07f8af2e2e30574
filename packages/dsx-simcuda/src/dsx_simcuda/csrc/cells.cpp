// The fused cells of LSTM and GRU, which torch has for CUDA only, in terms of other operators.
//
// torch.nn.LSTM, GRU and their cells call them on CUDA where cuDNN is not used. The workspace is what backward needs:
// the gates behind their functions, side by side. Its inside is known to these functions only.
#include <torch/library.h>

#include "device.h"

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

namespace sim {
namespace {

bool given(const MaybeTensor& t) { return t.has_value() && t->defined(); }

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) { return given(bias) ? gates + *bias : gates; }

Tensor slope_of_sigmoid(const Tensor& y) { return y * (1 - y); }

Tensor slope_of_tanh(const Tensor& y) { return 1 - y * y; }

// -> new hidden state, new cell state, workspace (batch, 4 hidden): input, forget, cell and output gate.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
    auto parts = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
    auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
    auto cy = forget * cx + in * cell;
    return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

// -> gradients of the gates (batch, 4 hidden), of the old cell state, and of a bias.
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
    if (!given(grad_hy) && !given(grad_cy)) return {};
    auto parts = workspace.chunk(4, 1);
    auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
    auto y = cy.tanh();
    auto of_hidden = given(grad_hy) ? *grad_hy : at::zeros_like(cx);
    auto of_cell = of_hidden * out * slope_of_tanh(y);
    if (given(grad_cy)) of_cell = of_cell + *grad_cy;
    auto gates = at::cat({of_cell * cell * slope_of_sigmoid(in), of_cell * cx * slope_of_sigmoid(forget),
                          of_cell * in * slope_of_tanh(cell), of_hidden * y * slope_of_sigmoid(out)},
                         1);
    return {gates, of_cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

// -> new hidden state, workspace (batch, 5 hidden): reset, update and new gate, old state, the new gate's hidden part.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
    auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
    auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    auto reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
    auto fresh = (of_input[2] + reset * of_hidden[2]).tanh();
    return {(hx - fresh) * update + fresh, at::cat({reset, update, fresh, hx, of_hidden[2]}, 1)};
}

// -> gradients of the input's gates, the hidden state's gates, the old state, and both biases.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
    auto parts = workspace.chunk(5, 1);
    auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden_part = parts[4];
    auto of_fresh = grad_hy * (1 - update) * slope_of_tanh(fresh);
    auto of_update = grad_hy * (hx - fresh) * slope_of_sigmoid(update);
    auto of_reset = of_fresh * hidden_part * slope_of_sigmoid(reset);
    auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
    auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
    auto bias = [&](const Tensor& gates) { return has_bias ? gates.sum(0) : Tensor(); };
    return {of_input, of_hidden, grad_hy * update, bias(of_input), bias(of_hidden)};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("_thnn_fused_lstm_cell", &lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    m.impl("_thnn_fused_gru_cell", &gru_cell);
    m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace
}  // namespace sim
