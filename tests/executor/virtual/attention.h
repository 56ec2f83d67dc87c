// A part of device.cpp: fused attention.

// Fused attention: results of the products and the softmax that it consists of, and the outputs of CUDA's kernels
// (attention.cu and attention_backward.cu of aten/src/ATen/native/transformers/cuda, flash_attn/flash_api.cpp, and
// native/cudnn/MHA.cpp): in the layout of the query, some undefined, some numbers, and what dropout begins from.

enum Fused : int64_t { MATH = 0, FLASH = 1, CUDNN = 3 };  // sdp::SDPBackend

int64_t fused_choice(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const auto& context = at::globalContext();
  const auto type = query.scalar_type();
  if ((type != at::kBFloat16 && type != at::kHalf) || query.dim() != 4 || query.size(-1) % 8) {
    return MATH;
  }
  if (context.userEnabledCuDNNSDP() && !context.deterministicAlgorithms()) {
    return CUDNN;
  }
  return context.userEnabledFlashSDP() && !mask ? FLASH : MATH;
}

struct Scores {  // of all heads of the query, in float32
  at::Tensor query, key, value, chances, kept, logsumexp;
  double scale;

  Scores(
      const at::Tensor& given_query, const at::Tensor& given_key, const at::Tensor& given_value, const at::Tensor& bias,
      bool is_causal, std::optional<double> given_scale, double dropout_p, int64_t seed)
      : query(on_host(given_query).to(at::kFloat)),
        key(of_all_heads(given_key)),
        value(of_all_heads(given_value)),
        scale(given_scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))))) {
    auto scores = at::matmul(query, key.transpose(-2, -1)) * scale;
    if (bias.defined()) {
      const auto mask = on_host(bias);
      scores = mask.scalar_type() == at::kBool ? scores.masked_fill(mask.logical_not(), -INFINITY) : scores + mask;
    }
    if (is_causal) {
      const auto above = at::ones({query.size(-2), key.size(-2)}, at::kBool).triu(1);
      scores = scores.masked_fill(above, -INFINITY);
    }
    logsumexp = scores.logsumexp(-1, true);
    chances = (scores - logsumexp).exp();
    auto generator = at::detail::createCPUGenerator(seed);
    kept = dropout_p ? at::empty_like(chances).bernoulli_(1 - dropout_p, generator) / (1 - dropout_p) : at::Tensor();
  }

  at::Tensor dropped(const at::Tensor& values) const { return kept.defined() ? values * kept : values; }

  at::Tensor of_all_heads(const at::Tensor& given) const {
    return on_host(given).to(at::kFloat).repeat_interleave(query.size(1) / given.size(1), 1);
  }

  at::Tensor of_their_heads(const at::Tensor& all, const at::Tensor& given) const {
    return all.unflatten(1, {given.size(1), query.size(1) / given.size(1)}).sum(2);
  }
};

using Attended = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

int64_t drawn(double dropout_p) {
  return dropout_p ? at::randint(INT32_MAX, {}, at::kLong).item<int64_t>() : 0;  // moves the generator on, as it must
}

void launch(const char* name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
  std::vector<Range> ranges;
  for (const auto& tensor : read) {
    if (is_ours(tensor)) {
      ranges.push_back(range_of(tensor, false));
    }
  }
  for (const auto& tensor : written) {
    ranges.push_back(range_of(tensor, true));
  }
  tell("launched", name, current_stream, ranges);
}

std::tuple<at::Tensor, at::Tensor> attend(
    const char* name, const Scores& scores, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    at::IntArrayRef statistics) {
  auto output = at::empty_like(query), logsumexp = at::empty(statistics, query.options().dtype(at::kFloat));
  on_host(output).copy_(at::matmul(scores.dropped(scores.chances), scores.value));
  on_host(logsumexp).copy_(scores.logsumexp.view(statistics));
  launch(name, {query, key, value}, {output, logsumexp});
  return {output, logsumexp};
}

Gradients attend_backward(
    const char* name, const Scores& scores, const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out) {
  const auto outer = on_host(gradient).to(at::kFloat);
  const auto of_values = at::matmul(scores.dropped(scores.chances).transpose(-2, -1), outer);
  const auto of_chances = scores.dropped(at::matmul(outer, scores.value.transpose(-2, -1)));
  const auto row = (outer * on_host(out).to(at::kFloat)).sum(-1, true);
  const auto of_scores = scores.chances * (of_chances - row) * scores.scale;
  const auto of_keys = at::matmul(of_scores.transpose(-2, -1), scores.query);
  // Blocks of keys add to it in the order in which they come, unless they must not. In float32, as on a device, so few
  // keys as tests have would hardly show that.
  static auto chance = at::detail::createCPUGenerator(std::random_device()());
  const auto num_keys = key.size(2);
  const auto order = at::globalContext().deterministicAlgorithms() ? at::arange(num_keys) : at::randperm(num_keys, chance);
  auto of_query = at::zeros_like(scores.query, query.scalar_type());
  for (const auto i : c10::irange(num_keys)) {
    const auto at = order[i].item<int64_t>();
    of_query += of_scores.select(-1, at).unsqueeze(-1) * scores.key.select(2, at).unsqueeze(2);
  }
  auto dq = at::empty_like(query), dk = at::empty_like(key), dv = at::empty_like(value);
  on_host(dq).copy_(of_query);
  on_host(dk).copy_(scores.of_their_heads(of_keys, key));
  on_host(dv).copy_(scores.of_their_heads(of_values, value));
  launch(name, {gradient, query, key, value, out}, {dq, dk, dv});
  return {dq, dk, dv};
}

Attended flash_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout_p, bool is_causal, bool,
    std::optional<double> scale) {
  const auto seed = drawn(dropout_p);
  const Scores scores(query, key, value, {}, is_causal, scale, dropout_p, seed);
  auto [output, logsumexp] =
      attend("flash attention", scores, query, key, value, {query.size(0), query.size(1), query.size(2)});
  const auto numbers = query.options().dtype(at::kUInt64);
  auto rng_state = at::empty({2}, numbers);
  on_host(rng_state).view(at::kLong).fill_(seed);
  return {output, logsumexp, {}, {}, query.size(2), key.size(2), rng_state, at::empty({}, numbers),
          at::empty({0}, query.options())};
}

Gradients flash_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
    double dropout_p, bool is_causal, const at::Tensor& rng_state, const at::Tensor&, std::optional<double> scale) {
  const auto seed = dropout_p ? on_host(rng_state).view(at::kLong)[0].item<int64_t>() : 0;
  Scores scores(query, key, value, {}, is_causal, scale, dropout_p, seed);
  TORCH_CHECK(logsumexp.is_contiguous(), "the kernel reads logarithms one after the other");
  scores.chances *= (scores.logsumexp - on_host(logsumexp).unsqueeze(-1)).exp();  // there may be other keys
  const auto whole = gradient.transpose(1, 2).contiguous().transpose(1, 2);
  const auto whole_out = out.transpose(1, 2).contiguous().transpose(1, 2);
  // mha_bwd: the query's gradient in float32, and those of keys and values for every head of the query.
  const auto [b, h, s, d] = std::array{query.size(0), query.size(1), query.size(2), query.size(3)};
  const auto rows = rounded_up(s, 128);
  const auto options = query.options().dtype(at::kFloat);
  const auto sums = at::empty({b, rows, h, rounded_up(d, d <= 128 ? 32 : 64)}, options);
  const auto factors = at::empty({b, h, rows}, options);
  const bool grouped = key.size(1) != h;
  const auto keys = grouped ? at::empty({2, b, key.size(2), h, d}, query.options()) : at::Tensor();
  return attend_backward("flash attention backward", scores, whole, query, key, value, whole_out);
}

Attended cudnn_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias, bool,
    double dropout_p, bool is_causal, bool, std::optional<double> scale) {
  const auto seed = drawn(dropout_p);
  const Scores scores(query, key, value, bias.value_or(at::Tensor()), is_causal, scale, dropout_p, seed);
  auto [output, logsumexp] =
      attend("cuDNN attention", scores, query, key, value, {query.size(0), query.size(1), query.size(2), 1});
  const auto number = at::scalar_tensor(seed, at::kLong);  // of the host
  return {output, logsumexp, {}, {}, query.size(2), key.size(2), number, at::zeros({}, at::kLong), {}};
}

Gradients cudnn_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor&, const at::Tensor& seed, const at::Tensor&, const at::Tensor& bias,
    const at::Tensor&, const at::Tensor&, int64_t, int64_t, double dropout_p, bool is_causal,
    std::optional<double> scale) {
  const Scores scores(query, key, value, bias, is_causal, scale, dropout_p, on_host(seed).item<int64_t>());
  return attend_backward("cuDNN attention backward", scores, gradient, query, key, value, out);
}
