"""Verification of drafts by sampling (temperature above 0), in plain torch.

SGLang has these for GPUs only and verifies greedily on a CPU, whatever the temperature; ``install`` puts
these in place. ``B`` requests, ``N`` nodes a verify call, ``A`` the longest accepted path, ``W`` words of the
vocabulary.
"""

# ruff: noqa: ARG001  # the signatures are those SGLang calls

from __future__ import annotations

import torch
from torch import Tensor


def row_argmax(scores: Tensor) -> Tensor:
    """Index of the greatest score of each row of ``[R, W]``, the smaller id of equals; ``[R]`` int64."""
    return scores.argmax(dim=-1)


def top_k_renorm_prob(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keeps the ``top_k`` likeliest words of each row and rescales them to sum to 1; ties go to small ids.

    Args:
        probs: ``[R, W]`` float32.
        top_k: ``[R]`` integer, at least 1; more than W keeps all.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    dropped = torch.arange(probs.shape[-1]) >= top_k.view(-1, 1)
    return _renormalised(ranked, order, dropped)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest likeliest words of each row that reach ``top_p`` and rescales them to sum to 1.

    Args:
        probs: ``[R, W]`` float32.
        top_p: ``[R]`` float32.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    dropped = ranked.cumsum(dim=-1) - ranked > top_p.view(-1, 1)
    return _renormalised(ranked, order, dropped)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Samples each tree from its root: one coin a node decides between its children and all other words.

    With both thresholds at 1, the text is distributed as the target's own. The first three tensors are
    filled, and the rest is read, as by :func:`~sglang_cpu_eagle.tree.verify_tree_greedy_cpu`.

    Args:
        uniform_samples: ``[B, N]`` float32 in [0, 1), the coin of each node.
        uniform_samples_for_final_sampling: ``[B]`` float32, the coin of the word behind the last accepted
            node.
        target_probs: ``[B, N, W]`` float32.
        draft_probs: ``[B, N, W]``, scratch space of the compiled kernel, not used.
        threshold_single: a child at least this likely is accepted at once.
        threshold_acc: the coin is compared with the children's summed probability over this.
        deterministic: no choice here, the result always follows from the coins.
    """
    tokens, flat = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, final_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    longest = accept_index.shape[1]
    for request in range(len(tokens)):
        path = [0]
        refused: list[int] = []
        while len(path) < longest:
            at, refused, mass = path[-1], [], 0.0
            node = children[request][at]
            while node != -1:
                chance = float(target_probs[request, at, tokens[request][node]])
                mass += chance
                if chance > 0 and (coins[request][at] < mass / threshold_acc or chance >= threshold_single):
                    break
                refused.append(tokens[request][node])
                node = siblings[request][node]
            if node == -1:
                break
            path.append(node)
            refused = []
        rest = target_probs[request, path[-1]].clone()
        rest[refused] = 0
        last = _draw(rest, final_coins[request])
        _commit(predicts, accept_index, accept_token_num, request, path, flat, tokens, last)


def chain_speculative_sampling(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Rejection sampling of a chain: a draft is kept with probability ``min(1, target / draft)``.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192). The text
    is distributed as the target's own. Arguments are those of :func:`tree_speculative_sampling_target_only`,
    except:

    Args:
        draft_probs: ``[B, >= N - 1, W]`` float32, the distribution each draft was drawn from.
        threshold_single, threshold_acc: must be 1.
        block_verification: must be False.
    """
    if block_verification:
        raise NotImplementedError("the CPU kernels of eagle-trace verify token by token: no block verification")
    if threshold_single != 1.0 or threshold_acc != 1.0:
        raise NotImplementedError("rejection sampling knows no acceptance thresholds: leave both at 1")
    tokens, flat = candidates.tolist(), retrive_index.tolist()
    coins, final_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    for request, chain in enumerate(tokens):
        path, rejected = [0], False
        for step in range(1, len(chain)):
            target = float(target_probs[request, step - 1, chain[step]])
            draft = float(draft_probs[request, step - 1, chain[step]])
            if not (draft > 0 and coins[request][step - 1] * draft < target):
                rejected = True
                break
            path.append(step)
        rest = target_probs[request, path[-1]]
        if rejected:
            rest = (rest - draft_probs[request, path[-1]]).clamp_min(0)
        last = _draw(rest, final_coins[request])
        _commit(predicts, accept_index, accept_token_num, request, path, flat, tokens, last)


def _renormalised(ranked: Tensor, order: Tensor, dropped: Tensor) -> Tensor:
    kept = ranked.masked_fill(dropped, 0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _draw(weights_W: Tensor, coin: float) -> int:
    """The word at which the running sum of the weights passes ``coin`` of their total."""
    running = weights_W.double().cumsum(dim=0)
    chosen = int(torch.searchsorted(running, coin * running[-1], right=True))
    if chosen < weights_W.numel():
        return chosen
    # Only when the coin rounds to 1 or nothing has weight: the last word that can be drawn at all.
    possible = weights_W.nonzero()
    return int(possible[-1]) if possible.numel() else weights_W.numel() - 1


def _commit(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    request: int,
    path: list[int],
    flat: list[list[int]],
    tokens: list[list[int]],
    last: int,
) -> None:
    """Writes the nodes passed, and behind each the token that follows it."""
    passed = [flat[request][node] for node in path]
    follow = [tokens[request][node] for node in path[1:]] + [last]
    accept_index[request, : len(passed)] = torch.tensor(passed, dtype=accept_index.dtype)
    accept_token_num[request] = len(passed) - 1
    predicts[passed] = torch.tensor(follow, dtype=predicts.dtype)
