"""Generate RULER prompts of any length: the largest haystack that fits, measured with the model's own tokenizer.

Every builder takes a source of randomness and a number of units (sentences, words, documents) and returns a prompt
that grows with the units; `kvcore.bench.ruler.fit` finds how many fit.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise

from scipy.special import zeta

from kvcore.bench.ruler.data import Draft, Question, QuestionSet, fragment, singular, task_configs, word_list
from kvcore.bench.ruler.fit import Growth, largest_units

DEPTHS = tuple(round(100 * i / 39) for i in range(40))
EXAMPLE_TOKENS = 500
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def make_growth(task: str, length: int, count_text: Callable[[str], int], haystack: Sequence[str]) -> Growth:
    """The builder of a task that needs no question set.

    Args:
        task: one of the 13 names but qa_1 and qa_2 (see `question_growth`).
        length: nominal length in tokens, generation included.
        count_text: tokens of a text, for the worked example of `vt`.
        haystack: words of the filler text.
    """
    kind, args = task_configs()[task]["task"], task_configs()[task]["args"]
    if kind == "niah":
        return needle_growth(task, haystack)
    if kind == "variable_tracking":
        return tracking_growth(args["num_hops"], count_text, min(EXAMPLE_TOKENS, length // 2))
    if kind == "common_words_extraction":
        return common_words_growth(length, args)
    return coded_words_growth(length, args["alpha"])


def _cut(template: str, prefix: str, context: str, references: Sequence[str], **values: object) -> Draft:
    """Fill a template; the context's end is where `{context}` stood."""
    head, _, tail = template.partition("{context}")
    return Draft(
        head.format(**values) + context, tail.format(**values), prefix.format(**values), tuple(map(str, references))
    )


def _random_value(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def needle_growth(task: str, haystack: Sequence[str]) -> Growth:
    """niah_*: needles in noise sentences, among other needles, or between the sentences of a text."""
    config = task_configs()[task]
    args = config["args"]
    num_keys = max(args["num_needle_k"], args["num_needle_q"])
    kind_k, kind_v = args["type_needle_k"], args["type_needle_v"]
    num_needles = num_keys * args["num_needle_v"]
    template, prefix, kind_text = config["template"], config["answer_prefix"], kind_v
    if args["num_needle_q"] * args["num_needle_v"] == 1:
        template, prefix, kind_text = singular(template), singular(prefix), kind_v[:-1]

    def needle(rng: random.Random, key: str, value: str) -> str:
        return fragment("needle").format(type_needle_v=kind_v, key=key, value=value)

    def build(rng: random.Random, units: int) -> Draft:
        keys = [_random_value(rng, kind_k) for _ in range(num_keys)]
        values = [[_random_value(rng, kind_v) for _ in range(args["num_needle_v"])] for _ in keys]
        needles = [needle(rng, key, value) for key, row in zip(keys, values, strict=True) for value in row]
        rng.shuffle(needles)
        if args["type_haystack"] == "essay":
            context = _between_sentences(rng, haystack, units, needles)
        else:
            lines = [fragment("noise")] * units
            if args["type_haystack"] == "needle":
                lines = [needle(rng, _random_value(rng, kind_k), _random_value(rng, kind_v)) for _ in range(units)]
            context = "\n".join(_inserted(rng, lines, needles))
        asked = rng.sample(range(num_keys), args["num_needle_q"])
        names = [keys[i] for i in asked]
        query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
        references = [value for i in asked for value in values[i]]
        return _cut(template, prefix, context, references, type_needle_v=kind_text, query=query)

    return Growth(build, least=num_needles)


def _inserted(rng: random.Random, lines: Sequence[str], extra: Sequence[str]) -> list[str]:
    """`extra` in order at random places between `lines`."""
    result, places = list(lines), sorted(rng.sample(range(len(lines)), len(extra)))
    for offset, (place, line) in enumerate(zip(places, extra, strict=True)):
        result.insert(place + offset, line)
    return result


def _between_sentences(rng: random.Random, words: Sequence[str], units: int, needles: Sequence[str]) -> str:
    """The first `units` words (repeated when there are fewer), needles on sentence borders at random depths."""
    text = " ".join(islice(cycle(words), units))
    sentences = _SENTENCE_END.split(text)
    places = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(needles)))
    for offset, (place, needle) in enumerate(zip(places, needles, strict=True)):
        sentences.insert(place + offset, needle)
    return " ".join(sentences)


def tracking_growth(num_hops: int, count_text: Callable[[str], int], example_tokens: int) -> Growth:
    """vt: a chain of assignments in noise, after a worked example of about `example_tokens` tokens."""
    config = task_configs()["vt"]

    def chain(rng: random.Random, units: int, letters: int) -> Draft:
        names: list[str] = []
        while len(names) <= num_hops:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            names += [] if name in names else [name]
        value = rng.randint(10000, 99998)
        lines = [fragment("assign_value").format(name=names[0], value=value)]
        lines += [
            fragment("assign_variable").format(name=name, previous=previous) for previous, name in pairwise(names)
        ]
        context = "\n".join(_inserted(rng, [fragment("noise")] * units, lines))
        return _cut(config["template"], config["answer_prefix"], context, names, query=value, num_v=num_hops + 1)

    def example(rng: random.Random, units: int) -> Draft:
        draft = chain(rng, units, letters=3)
        solved = f"{draft.context}{draft.question}{draft.answer_prefix} {' '.join(draft.references)}\n\n"
        return Draft(solved, "", "", draft.references)

    least = num_hops + 1
    # where a tokenizer spends more than that on the smallest example, the smallest it is
    units = largest_units(
        lambda n: count_text(example(random.Random("example"), n).context), least, None, example_tokens
    )
    example_units = max(units, least)

    def build(rng: random.Random, units: int) -> Draft:
        shown = example(rng, example_units)
        draft = chain(rng, units, letters=5)
        return Draft(shown.context + draft.context, draft.question, draft.answer_prefix, draft.references)

    return Growth(build, least)


def common_words_growth(length: int, args: dict[str, int]) -> Growth:
    """cwe: ten words repeated often among words repeated seldom, after a worked example."""
    config = task_configs()["cwe"]
    pool = sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")})
    short = length < 4096
    repeats = (6, 1) if short else (args["freq_cw"], args["freq_ucw"])
    example = (20, 3, 1) if short else (40, 10, 3)
    num_common = args["num_cw"]

    def numbered(words: Sequence[str]) -> str:
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))

    def listing(rng: random.Random, num_words: int, often: int, seldom: int) -> tuple[str, list[str]]:
        words = rng.sample(pool, num_words)
        common, rest = words[:num_common], words[num_common:]
        entries = common * often + rest * seldom
        rng.shuffle(entries)
        return numbered(entries), common

    def build(rng: random.Random, units: int) -> Draft:
        shown, solution = listing(rng, *example)
        solved = _cut(config["template"], config["answer_prefix"], shown, solution)
        context, common = listing(rng, units, *repeats)
        draft = _cut(config["template"], config["answer_prefix"], context, common)
        head = f"{solved.context}{solved.question}{solved.answer_prefix} {numbered(solution)}\n"
        return Draft(head + draft.context, draft.question, draft.answer_prefix, draft.references)

    return Growth(build, least=num_common + 1, most=len(pool))


def coded_words_growth(length: int, alpha: float, letters: int = 6) -> Growth:
    """fwe: coded words with Zeta-distributed counts; the most frequent one is shown as dots, the next three asked."""
    config = task_configs()["fwe"]
    size = max(length // 50, 6)

    def counts(units: int) -> list[int]:
        return [int(units * rank**-alpha / zeta(alpha)) for rank in range(1, size + 1)]

    def distinct(units: int) -> bool:
        found = counts(units)
        return found[3] > found[4]

    least = next(units for units in range(1, 10**6) if distinct(units))

    def build(rng: random.Random, units: int) -> Draft:
        # a tie between the third and the fourth word has no answer: take the next smaller text without one
        while not distinct(units):
            units -= 1
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < size:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=letters))] = None
        words = list(vocabulary)
        words[0] = "..."
        entries = [word for word, times in zip(words, counts(units), strict=True) for _ in range(times)]
        rng.shuffle(entries)
        return _cut(config["template"], config["answer_prefix"], " ".join(entries), words[1:4])

    return Growth(build, least)


def question_growth(task: str, questions: QuestionSet, question: Question) -> Growth:
    """qa_*: the question's documents among others, in random order, numbered."""
    config = task_configs()[task]
    others = [i for i in range(len(questions.documents)) if i not in {*question.own, *question.related}]

    def build(rng: random.Random, units: int) -> Draft:
        wanted = units - len(question.own)
        chosen = [*question.own, *rng.sample(question.related, min(wanted, len(question.related)))]
        chosen += rng.sample(others, units - len(chosen))
        rng.shuffle(chosen)
        context = "\n\n".join(
            fragment("document").format(i=i, document=questions.documents[index]) for i, index in enumerate(chosen, 1)
        )
        return _cut(config["template"], config["answer_prefix"], context, question.answers, query=question.query)

    return Growth(build, least=len(set(question.own)), most=len(questions.documents))
