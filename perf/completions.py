"""Two ways to have prompts completed: an OpenAI-compatible server, or an engine directory in this process.

Both yield one result for each prompt, in order. What went wrong with one prompt is its `Failure`; nothing is retried.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from twostroke.engines.errors import ConfigError, TwostrokeError

if TYPE_CHECKING:
    from twostroke.runtime.generation import Generation
    from twostroke.runtime.llm import LLM


@dataclass(frozen=True)
class Completion:
    """`tokens` is None where the server does not count them; `cut` by the token budget. Tokens of decode iterations
    over `iterations` tell what speculation brought; no iterations where nobody tells."""

    text: str
    tokens: int | None
    cut: bool
    emitted: int = 0
    iterations: int = 0


@dataclass(frozen=True)
class Failure:
    """Why there is no completion."""

    reason: str


@dataclass(frozen=True)
class Sampling:
    """What every prompt is asked with."""

    max_tokens: int
    temperature: float
    stop: str


def complete_with_engine(llm: LLM, prompts: Sequence[str], sampling: Sampling) -> Iterator[Completion | Failure]:
    """All prompts are queued at once; the engine runs as many as its batch holds, and fills up as they end."""
    from twostroke.runtime.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature, stop=sampling.stop)
    queued: list[Generation | Failure] = []
    for prompt in prompts:
        try:
            queued.append(llm.generate_async(prompt, params))
        except TwostrokeError as error:
            queued.append(Failure(str(error)))
    for entry in queued:
        if isinstance(entry, Failure):
            yield entry
            continue
        try:
            output = entry.result()
        except Exception as error:  # whatever ended this request, the others' answers count
            yield Failure(str(error) or type(error).__name__)
            continue
        answer, acceptance = output.outputs[0], output.acceptance
        yield Completion(
            text=answer.text,
            tokens=answer.length,
            cut=answer.finish_reason == "length",
            emitted=acceptance.emitted if acceptance else 0,
            iterations=acceptance.iterations if acceptance else 0,
        )


@dataclass(frozen=True)
class Endpoint:
    """The completions endpoint of a server. `timeout` is the seconds it may take to connect, and to say anything."""

    base_url: str
    model: str
    timeout: float

    def __post_init__(self) -> None:
        try:
            usable = self._address.scheme in ("http", "https") and self._address.hostname and self._address.port != 0
        except ValueError:  # the port is no number
            usable = False
        if not usable:
            raise ConfigError(f"--base-url is {self.base_url!r}, expected one like http://localhost:8000/v1")

    @property
    def _address(self) -> SplitResult:
        return urlsplit(self.base_url)

    def complete(self, prompts: Sequence[str], sampling: Sampling, parallel: int) -> Iterator[Completion | Failure]:
        """Keeps `parallel` requests under way, on a connection each."""
        with ThreadPoolExecutor(parallel) as pool:
            yield from pool.map(lambda prompt: self._complete(prompt, sampling), prompts)

    def _complete(self, prompt: str, sampling: Sampling) -> Completion | Failure:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop": [sampling.stop],
        }
        try:
            status, answer = self._post(json.dumps(body).encode())
        except TimeoutError:
            return Failure(f"no answer within {self.timeout:g} seconds (--timeout)")
        except ConnectionRefusedError:
            return Failure("connection refused; is the server running?")
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: no host's name, no path
            return Failure(f"{type(error).__name__}: {error}")
        if status != 200:
            return Failure(f"HTTP {status}: {_message(answer)}")
        try:
            return _completion(json.loads(answer))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return Failure(f"HTTP 200 without a completion: {_shortened(answer)}")

    def _post(self, body: bytes) -> tuple[int, bytes]:
        address = self._address
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=self.timeout)
        try:
            path = f"{address.path.rstrip('/')}/completions"
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _completion(answer: Any) -> Completion:
    choice = answer["choices"][0]
    if not isinstance(choice["text"], str):
        raise TypeError("text is no text")
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    if tokens is not None and not isinstance(tokens, int):
        raise TypeError("completion_tokens is no number")
    return Completion(choice["text"], tokens, cut=choice.get("finish_reason") == "length")


def _message(body: bytes) -> str:
    """What a server says of an error: `error.message` like OpenAI's, `message` or `detail` like others, or the body."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        said = error if isinstance(error, str) else error.get("message") or error["detail"]
    except (ValueError, KeyError, AttributeError):
        return _shortened(body)
    return said if isinstance(said, str) else json.dumps(said)


def _shortened(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text if len(text) <= 200 else f"{text[:197]}..."
