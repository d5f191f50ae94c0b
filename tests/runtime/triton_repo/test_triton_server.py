"""A real tritonserver: the text is what the engine generates without one."""

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from engines import DEMO_PROMPTS
from triton_examples import examples
from tritonserver import GrpcStream, TritonServer, text_of, within
from trtree.runtime.session import Session

Expected = Callable[..., str]
PROMPTS = (*DEMO_PROMPTS[:2], "The ☃ of")
PROMPT = PROMPTS[0]
SPECULATION: tuple[dict[str, Any], ...] = (
    {},
    {"speculative_mode": "plain"},
    {"speculative_mode": "chain"},
    {"speculative_mode": "tree", "speculative_tree_budget": 5},
)
# The older layout's clients send a batch of one; the name of their flag for streaming.
MODELS = [("trtree", "streaming"), ("ensemble", "stream"), ("tensorrt_llm_bls", "stream")]
ENDLESS = {
    "text_input": PROMPT,
    "max_tokens": 1500,
    "sampling_param_ignore_eos": True,
    "speculative_mode": "plain",
}


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
@pytest.mark.parametrize(("model", "stream"), MODELS)
def test_every_endpoint_gives_the_engines_text(
    server: TritonServer, expected: Expected, model: str, stream: str, speculation: dict[str, Any]
) -> None:
    grpc = GrpcStream(server)
    for prompt in PROMPTS:
        text = expected(prompt, 40)
        values = {"text_input": prompt, "max_tokens": 40, **speculation}
        assert server.generate(model, **values)["text_output"] == text
        (whole,) = server.generate_stream(model, **values)
        assert whole["text_output"] == text
        events = server.generate_stream(model, **values, **{stream: True})
        assert text_of(events) == text
        assert len(events) > 2
        grpc.send(model, batched=model != "trtree", **values, **{stream: True})
        assert text_of(grpc.rest()) == text
    grpc.cancel()


@pytest.mark.parametrize(("model", "batched"), [("trtree", False), ("ensemble", True)])
@pytest.mark.parametrize("speculation", SPECULATION[:2], ids=str)
def test_plain_inference_requests(
    single_server: TritonServer,
    expected: Expected,
    model: str,
    batched: bool,
    speculation: dict[str, Any],
) -> None:
    """``/infer`` needs models that answer once; ``trtree`` runs on two ranks here."""
    for prompt in PROMPTS:
        values = {"text_input": prompt, "max_tokens": 40, **speculation}
        answer = single_server.infer(model, batched=batched, **values)
        assert answer["text_output"] == [expected(prompt, 40)]
        assert single_server.generate(model, **values)["text_output"] == expected(prompt, 40)
    refused = single_server.generate("trtree", text_input=PROMPT, streaming=True)
    assert "streaming needs a decoupled model" in refused["error"]


def test_requests_share_steps(
    server: TritonServer, single_server: TritonServer, expected: Expected
) -> None:
    text = expected(PROMPT, 95)
    for one in (server, single_server):  # in this process, and on two ranks
        before = one.metric("trtree_target_forwards_total")
        tokens_before = one.metric("trtree_output_tokens_total")

        def generate(i: int, one: TritonServer = one) -> dict[str, Any]:
            return one.generate(text_input=PROMPT, max_tokens=64 + i, speculative_mode="plain")

        with ThreadPoolExecutor(32) as pool:  # Triton queues none of them
            answers = list(pool.map(generate, range(32)))
        for answer in answers:
            assert text.startswith(answer["text_output"].removesuffix("\ufffd"))
        tokens = sum(answer["num_output_tokens"] for answer in answers)
        assert tokens == sum(range(64, 96))
        # Triton's metrics follow the executor's now and then: what came before may come with them.
        enough = tokens_before + tokens
        assert within(30, lambda one=one, n=enough: one.metric("trtree_output_tokens_total") >= n)
        all_tokens = one.metric("trtree_output_tokens_total") - tokens_before
        forwards = one.metric("trtree_target_forwards_total") - before
        assert 0 < forwards < all_tokens / 3
        assert one.metric("trtree_step_requests_max", "trtree") == 8  # the demo's max_batch_size


def test_figures_of_an_answer(server: TritonServer, demo_session: Callable[..., Session]) -> None:
    answer = server.generate(
        text_input=PROMPT, max_tokens=40, return_log_probs=True, return_cumulative_logprob=True
    )
    assert answer["finish_reason"] == "length"
    assert answer["num_input_tokens"] == len(demo_session().tokenizer.encode(PROMPT))
    assert answer["num_output_tokens"] == 40
    drafted, accepted = answer["total_draft_tokens"], answer["total_accepted_draft_tokens"]
    assert 0 < accepted < 40 < drafted
    assert answer["acceptance_rate"] == pytest.approx(accepted / drafted)
    log_probs = answer["output_log_probs"]
    assert len(log_probs) == 40
    assert max(log_probs) < 0
    assert answer["cumulative_logprob"] == pytest.approx(sum(log_probs), rel=1e-5)
    plain = server.generate(
        text_input=PROMPT, max_tokens=40, return_log_probs=True, speculative_mode="plain"
    )
    assert plain["output_log_probs"] == log_probs
    assert plain["total_draft_tokens"] == plain["acceptance_rate"] == 0
    streamed = server.generate_stream(
        text_input=PROMPT, max_tokens=40, return_log_probs=True, streaming=True
    )
    pieces = [np.atleast_1d(event["output_log_probs"]) for event in streamed]
    assert np.concatenate(pieces).tolist() == log_probs


def test_stops_and_sampling(server: TritonServer, expected: Expected) -> None:
    text = expected(PROMPT, 40)
    word = text.split()[4]
    answer = server.generate(text_input=PROMPT, max_tokens=40, sampling_param_stop=[word])
    assert answer["text_output"] == text[: text.index(word)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", word)
    for model in ("ensemble", "tensorrt_llm_bls"):  # there the word is part of the output
        answer = server.generate(model, text_input=PROMPT, max_tokens=40, stop_words=[word])
        assert answer["text_output"].startswith(text[: text.index(word)] + word)
        assert len(answer["text_output"]) < len(text)
    sampled = {"text_input": PROMPT, "max_tokens": 24, "sampling_param_temperature": 1.5}
    texts = [
        server.generate(**sampled, sampling_param_seed=seed, **speculation)["text_output"]
        for seed in (7, 8)
        for speculation in SPECULATION
    ]
    assert texts == texts[:1] * 4 + texts[4:5] * 4
    assert texts[0] != texts[4]
    several = server.generate(**sampled, sampling_param_seed=7, sampling_param_n=3)
    assert several["text_output"][0] == texts[0]
    assert len(set(several["text_output"])) == 3
    echoed = server.generate(
        text_input=PROMPT, max_tokens=40, sampling_param_exclude_input_from_output=False
    )
    assert echoed["text_output"] == PROMPT + text


def test_token_ids_in_and_out(server: TritonServer, demo_session: Callable[..., Session]) -> None:
    tokenizer = demo_session().tokenizer
    ids = tokenizer.encode(PROMPT)
    longer = tokenizer.encode(PROMPTS[1])
    width = max(len(ids), len(longer))
    batch = np.zeros((2, width), np.int32)
    batch[0, : len(ids)], batch[1, : len(longer)] = ids, longer
    values = {
        "input_ids": batch,
        "input_lengths": np.array([[len(ids)], [len(longer)]], np.int32),
        "request_output_len": np.array([[20], [30]], np.int32),
    }
    grpc = GrpcStream(server)
    grpc.send("tensorrt_llm", **values)
    answers = {int(one["batch_index"].item()): one for one in grpc.rest()}
    for index, (prompt, count) in enumerate(((ids, 20), (longer, 30))):
        expected = demo_session().complete(_plain(demo_session(), prompt, count)).token_ids
        assert answers[index]["output_ids"].tolist() == [[expected]]
        assert answers[index]["sequence_length"].tolist() == [[count]]
    grpc.send("tensorrt_llm", **values, streaming=np.full((2, 1), True))
    pieces: dict[int, list[int]] = {0: [], 1: []}
    for one in grpc.rest():
        pieces[int(one["batch_index"].item())] += one["output_ids"].reshape(-1).tolist()
    assert [len(pieces[0]), len(pieces[1])] == [20, 30]
    assert pieces[1] == answers[1]["output_ids"].reshape(-1).tolist()
    grpc.cancel()


@pytest.mark.parametrize(
    ("model", "values", "named"),
    [
        ("trtree", {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ("trtree", {"max_tokens": 5000}, "5000 exceed the engine's max_seq_len"),
        ("trtree", {"speculative_mode": "grove"}, "'grove' is none of plain, chain, tree"),
        ("trtree", {"speculative_tree_budget": 9999}, "tree_budget 9999 needs a verify width"),
        ("trtree", {"sampling_param_temperature": -1.0}, "temperature"),
        ("trtree", {"sampling_param_top_p": 7.0}, "top_p"),
        ("trtree", {"sampling_param_n": 2, "streaming": True}, "not sampling_param_n 2"),
        ("trtree", {"unheard_of": 3}, "unknown parameter unheard_of"),
        ("trtree", {"stop": True}, "stop needs the id"),
        ("ensemble", {"beam_width": 2}, "beam_width 2 is not supported; only 1 is"),
        ("ensemble", {"bad_words": ["a little violin"]}, "only single ones can be"),
        ("tensorrt_llm_bls", {"min_tokens": 9}, "min_tokens 9 is not supported"),
        ("tensorrt_llm_bls", {"max_tokens": -4}, "request_output_len must be at least 1, not -4"),
    ],
)
def test_a_bad_parameter_is_an_error_and_no_more(
    server: TritonServer, expected: Expected, model: str, values: dict[str, Any], named: str
) -> None:
    assert (
        named in server.generate(model, **{"text_input": PROMPT, "max_tokens": 8} | values)["error"]
    )
    answer = server.generate(model, text_input=PROMPT, max_tokens=8)
    assert answer["text_output"] == expected(PROMPT, 8)


def test_a_bad_parameter_over_grpc(server: TritonServer, expected: Expected) -> None:
    grpc = GrpcStream(server)
    grpc.send(text_input=PROMPT, speculative_mode="grove")
    with pytest.raises(InferenceServerException, match="'grove' is none of"):
        grpc.next()
    grpc.send(text_input=PROMPT, max_tokens=8)
    assert text_of(grpc.rest()) == expected(PROMPT, 8)
    grpc.cancel()


@pytest.mark.parametrize("model", ["trtree", "tensorrt_llm_bls"])
def test_pages_are_free_once_a_client_has_gone(server: TritonServer, model: str) -> None:
    """Over HTTP and gRPC."""
    values = {"trtree": ENDLESS | {"streaming": True}}.get(
        model, {"text_input": PROMPT, "max_tokens": 1500, "end_id": -1, "stream": True}
    )
    count = 8  # a batch's time is long against the half second between looks at the metrics

    def tokens() -> float:
        return server.metric("trtree_output_tokens_total")

    def end_before_their_time(began: float, leave: Callable[[], None]) -> bool:
        assert within(60, lambda: tokens() > began)
        leave()
        return server.idle() and tokens() - began < count * 1500

    before = tokens()
    streams = [server.events(model, **values) for _ in range(count)]
    for events in streams:
        assert "error" not in next(events)
    assert end_before_their_time(before, lambda: [events.close() for events in streams])
    before = tokens()
    grpc = GrpcStream(server)
    for _ in range(count):
        grpc.send(model, batched=model != "trtree", **values)
    grpc.next()
    assert end_before_their_time(before, grpc.cancel)


def test_stop_ends_the_request_of_that_id(server: TritonServer) -> None:
    grpc = GrpcStream(server)
    grpc.send(**ENDLESS, streaming=True, request_id="17")
    grpc.next()
    other = GrpcStream(server)
    other.send(stop=True, request_id="17")
    assert other.next() == ({}, True)
    assert grpc.rest()[-1]["finish_reason"].tolist() == [b"cancelled"]
    assert server.idle()
    for stream in (grpc, other):
        stream.cancel()


def _plain(session: Session, prompt: list[int], max_tokens: int) -> Any:
    from trtree.runtime.executor import Request

    return Request(prompt, max_tokens, speculative=session.speculative_config("plain"))


def test_the_documents_examples(server: TritonServer) -> None:
    outputs = []
    for block, command in examples(server):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert '"error"' not in done.stdout
        outputs.append(done.stdout)
    assert len(outputs) == 5
    for output in (outputs[0], outputs[4]):
        assert "In Drenburg there lived a crow called Choric." in output
    assert "trtree_accepted_tokens_total" in outputs[3]
    assert "of the draft nodes were accepted" in outputs[4]
