// The target's own choice at a row, from its logits.
//
// With the tokens of the sequence so far and the seed, a choice depends on nothing but
// the row's logits and the token's index in the sequence. So where logits are the same,
// plain decoding, chains and trees choose the same tokens, at any temperature; and as each
// choice is one sample of the target's distribution after that prefix, a walk down a tree
// is a sample of the target's distribution over texts, whatever was drafted.
//
// The logits are processed in this order:
// 1. Logit bias: added, in float32.
// 2. Repetition penalty r (Keskar et al., "CTRL", arXiv 1909.05858, section 4.1, in the
//    form in common use): a token in the prompt or the output has a positive logit divided
//    by r, any other multiplied by r.
// 3. Presence and frequency penalty: a token that is c > 0 times in the output loses
//    presence + c * frequency.
// 4. Temperature 0: the largest logit, equal ones by lower id, and nothing below applies.
//    Otherwise token i weighs w_i = exp((logit_i - max) / temperature), in float64.
// 5. Top-k: only the k largest logits stay, equal ones by lower id.
// 6. Top-p: in decreasing order of logit, equal ones by lower id, a token stays while the
//    tokens before it hold less than top_p of the weight left by 5.
// 7. Min-p: a token stays if it weighs min_p or more; the largest logit weighs 1.
// 8. One draw: for u in [0, 1) (philox.hpp), the first token in order of id at which the
//    sum of the weights that stay exceeds u times all of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/cpp/request.hpp"
#include "runtime/cpp/token_counts.hpp"

namespace trtree {

// Throw std::invalid_argument, naming the parameter, its value and its range.
void check_sampling(const SamplingConfig& config, int32_t vocab_size);

// Whether choose() looks at the counts at all; where not, they need not be kept.
bool uses_counts(const SamplingConfig& config);

// The token at index `position` of the sequence (prompt included), from the logits
// [vocab_size] of the row before it. `counts` are those of the tokens before `position`.
// `config` has passed check_sampling. -inf forbids a token. Throws std::runtime_error for
// NaN, +inf, and a row of -inf alone.
int32_t choose(std::span<const float> logits, const SamplingConfig& config,
               const TokenCounts& counts, int64_t position);

// The probabilities [vocab_size] that choose() draws from; at temperature 0, of one token.
std::vector<double> distribution(std::span<const float> logits, const SamplingConfig& config,
                                 const TokenCounts& counts);

// The log-prob and rank of `token` and the `top` most probable tokens, from the logits as
// they are. Log-sum-exp is float64. Equal logits rank by lower id; tokens of log-prob
// -inf are no alternatives. Throws like choose().
TokenLogProbs log_probs(std::span<const float> logits, int32_t token, int32_t top);

}  // namespace trtree
