"""The draft tree: its links, masks and positions, and greedy verification, in plain torch.

Node 0 of a request is the token the target committed last; nodes 1 .. N-1 are draft tokens in the order of
``selected_index``. ``B`` requests, ``N`` nodes (draft tokens of a verify call), ``A`` the longest accepted
path.
"""

from __future__ import annotations

import torch
from torch import Tensor

_QLEN_ONLY = 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links the selected draft tokens into a tree; fills the five tensors behind ``verified_seq_len``.

    Args:
        parent_list: ``[B, topk * (depth - 1) + 1]`` int64, for each expanded branch the candidate it grew
            from.
        selected_index: ``[B, N - 1]`` int64, the candidates kept, ascending; candidate ``c`` grew on branch
            ``c // topk``.
        verified_seq_len: ``[B]`` int64, tokens committed.
        tree_mask: ``[B * N * N]`` bool, ancestors and self of each node.
        positions: ``[B * N]`` int64, tokens committed plus depth in the tree.
        retrive_index: ``[B, N]`` int64, flat number of each node.
        retrive_next_token, retrive_next_sibling: ``[B, N]`` int64, first child and next sibling, -1 for none.
        topk, depth, draft_token_num: shape of the tree; ``draft_token_num`` is N.
        tree_mask_mode: must be QLEN_ONLY (1), what SGLang asks for on a CPU.

    A node whose parent was not selected is linked to nothing, so it can never be accepted.
    """
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(
            "the CPU kernels of eagle-trace build tree masks over the draft tokens only (QLEN_ONLY), "
            f"not mode {int(tree_mask_mode)}"
        )
    batch, nodes = verified_seq_len.numel(), draft_token_num
    parent_BN = _parents(parent_list, selected_index, topk)
    ancestors_BNN = _ancestors(parent_BN, depth)
    tree_mask.view(batch, nodes, nodes).copy_(ancestors_BNN)
    # The root is visible to every node but no step of the walk to it, hence the minus one.
    depth_BN = ancestors_BNN.sum(dim=-1) - 1
    positions.view(batch, nodes).copy_(verified_seq_len[:, None] + depth_BN)
    retrive_index.copy_(torch.arange(batch * nodes).view(batch, nodes))

    order_N = torch.arange(nodes)
    child_BNN = parent_BN[:, None, :] == order_N[:, None]
    retrive_next_token.copy_(_first_true(child_BNN))
    younger = order_N[None, :] > order_N[:, None]
    linked = parent_BN >= 0
    sibling_BNN = (parent_BN[:, None, :] == parent_BN[:, :, None]) & linked[:, :, None] & younger
    retrive_next_sibling.copy_(_first_true(sibling_BNN))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks each tree from its root while a child is the target's own choice; fills the first three tensors.

    Args:
        predicts: ``[B * N]`` int32; the target's token at every node passed and at the last one.
        accept_index: ``[B, A]`` int32, flat numbers of the nodes passed; the rest is left as it was (-1).
        accept_token_num: ``[B]`` int32, draft tokens accepted, so at most ``A - 1``.
        candidates: ``[B, N]`` integer, the tokens of the nodes.
        retrive_index, retrive_next_token, retrive_next_sibling: ``[B, N]`` int64, as built above.
        target_predict: ``[B, N]`` (or flat) integer, the target's choice behind every node.
    """
    target = target_predict.reshape(-1).tolist()
    tokens, flat = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    longest = accept_index.shape[1]
    for request in range(len(tokens)):
        path = [0]
        while len(path) < longest:
            wanted = target[flat[request][path[-1]]]
            node = children[request][path[-1]]
            while node != -1 and tokens[request][node] != wanted:
                node = siblings[request][node]
            if node == -1:
                break
            path.append(node)
        passed = [flat[request][node] for node in path]
        accept_index[request, : len(passed)] = torch.tensor(passed, dtype=accept_index.dtype)
        accept_token_num[request] = len(passed) - 1
        predicts[passed] = torch.tensor([target[node] for node in passed], dtype=predicts.dtype)


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Parent of every node, ``[B, N]`` int64; -1 for the root and where the parent was not selected."""
    branch = selected_index // topk
    if parent_list.shape[1] == 0:
        # A single step: every candidate hangs on the root.
        parent = torch.zeros_like(branch)
    else:
        origin = parent_list.gather(1, branch.clamp_max(parent_list.shape[1] - 1))
        found = _first_true(selected_index[:, None, :] == origin[:, :, None])
        parent = torch.where(found >= 0, found + 1, -1)
        parent = torch.where(branch == 0, 0, parent)
    root = torch.full((parent.shape[0], 1), -1, dtype=parent.dtype)
    return torch.cat([root, parent], dim=1)


def _ancestors(parent_BN: Tensor, depth: int) -> Tensor:
    """``[B, N, N]`` bool: node ``j`` is node ``i``, an ancestor of it, or the root."""
    batch, nodes = parent_BN.shape
    seen = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    current = parent_BN
    for _ in range(depth):
        seen.scatter_(2, current.clamp_min(0)[..., None], True)
        current = torch.where(current > 0, parent_BN.gather(1, current.clamp_min(0)), 0)
    return seen


def _first_true(mask: Tensor) -> Tensor:
    """Index of the first True along the last axis, -1 where there is none; int64."""
    if mask.shape[-1] == 0:
        return torch.full(mask.shape[:-1], -1, dtype=torch.int64)
    return torch.where(mask.any(dim=-1), mask.to(torch.int8).argmax(dim=-1), -1)
