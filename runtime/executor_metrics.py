"""The executor's statistics as metrics: what every server reports, by the same names."""

from collections.abc import Callable

from trtree.runtime.executor import ExecutorStatistics

# name, help, value of an executor's statistics
GAUGES: tuple[tuple[str, str, Callable[[ExecutorStatistics], float]], ...] = (
    ("requests_running", "Requests that hold a slot", lambda s: s.active_requests),
    ("requests_waiting", "Requests in the queue", lambda s: s.queued_requests),
    ("kv_pages", "KV pages in all", lambda s: s.total_pages),
    ("kv_pages_free", "KV pages that hold nothing", lambda s: s.free_pages),
    (
        "prefix_cache",
        "1 where prompts may begin on cached pages",
        lambda s: float(s.prefix_cache),
    ),
    ("kv_pages_cached", "KV pages only the prefix cache holds", lambda s: s.cached_pages),
    (
        "tree_state_exact",
        "1 where sibling branches leave each other's state alone",
        lambda s: float(s.exact_tree_state),
    ),
    (
        "state_snapshots",
        "Places for snapshots of recurrent state",
        lambda s: s.total_snapshots,
    ),
    (
        "state_snapshots_cached",
        "Snapshots of recurrent state beside cached pages",
        lambda s: s.cached_snapshots,
    ),
    ("step_rows", "Rows of the last step", lambda s: s.last_step_rows),
    ("step_requests", "Requests in the last step", lambda s: s.last_step_requests),
    (
        "step_requests_max",
        "Most requests in one step since the executor began",
        lambda s: s.max_step_requests,
    ),
    ("step_tree_nodes", "Draft nodes in the last step", lambda s: s.last_step_tree_nodes),
    (
        "tree_budget",
        "Draft nodes per request in the last step",
        lambda s: s.last_step_tree_nodes / max(s.last_step_requests, 1),
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[ExecutorStatistics], float]], ...] = (
    ("target_forwards", "Passes of the target", lambda s: s.target_forwards),
    ("drafter_forwards", "Passes of the drafter", lambda s: s.drafter_forwards),
    ("verify_forwards", "Verify passes, summed over requests", lambda s: s.verify_forwards),
    ("prompt_tokens", "Prompt tokens of admitted requests", lambda s: s.prompt_tokens),
    (
        "cached_prompt_tokens",
        "Prompt tokens taken from the prefix cache",
        lambda s: s.cached_prompt_tokens,
    ),
    (
        "state_snapshots_saved",
        "Snapshots of recurrent state taken",
        lambda s: s.snapshots_saved,
    ),
    (
        "state_snapshots_loaded",
        "Requests that went on from a snapshot",
        lambda s: s.snapshots_loaded,
    ),
    ("output_tokens", "Tokens generated", lambda s: s.output_tokens),
    ("drafted_tokens", "Draft nodes verified", lambda s: s.drafted_tokens),
    ("accepted_tokens", "Draft nodes accepted", lambda s: s.accepted_tokens),
    (
        "drafter_extended_tokens",
        "Tokens committed to the drafter's context too",
        lambda s: s.extended_tokens,
    ),
    (
        "drafter_catch_ups",
        "Times a request ran tokens again to draft",
        lambda s: s.drafter_catch_ups,
    ),
    ("preemptions", "Times a request's pages were taken away", lambda s: s.preemptions),
)
