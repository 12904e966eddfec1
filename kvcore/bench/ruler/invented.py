"""Questions about invented people and places, for qa_1 and qa_2 where SQuAD and HotpotQA cannot be downloaded.

qa_1 asks one fact of one document; qa_2 asks a fact through a second document (where does the founder of a company
come from?). Every name is made of words of RULER's own lists, so that no model knows the answer.
"""

from __future__ import annotations

import random

from kvcore.bench.ruler.data import Question, QuestionSet, word_list

NUM_QUESTIONS = 500


def invented_questions(dataset: str, seed: int) -> QuestionSet:
    """A set of questions in the style of `squad` (one document) or `hotpotqa` (two documents)."""
    rng = random.Random(f"{seed}/invented/{dataset}")
    nouns = [word for word in word_list("noun") if word.isalpha() and 4 <= len(word) <= 9]
    names = [f"{first.title()} {last.title()}" for first, last in _pairs(rng, nouns, NUM_QUESTIONS)]
    towns = [f"{a.title()}{b}" for a, b in _pairs(rng, nouns, NUM_QUESTIONS)]
    firms = [f"{a.title()} & {b.title()}" for a, b in _pairs(rng, nouns, NUM_QUESTIONS)]
    trades = [rng.choice(nouns) for _ in names]
    years = [str(rng.randint(1200, 1990)) for _ in names]
    people = [
        f"{name} was born in the town of {town} in {year}. As a young adult {name} learned to repair every kind of "
        f"{trade}, and later wrote a long book about it that is still read in {town} today."
        for name, town, year, trade in zip(names, towns, years, trades, strict=True)
    ]
    if dataset == "squad":
        questions = tuple(
            Question(f"In which town was {name} born?", (town,), (index,))
            for index, (name, town) in enumerate(zip(names, towns, strict=True))
        )
        return QuestionSet(questions, tuple(people))
    companies = [
        f"{firm} is a company that was founded by {name}. It sells a {trade} of its own making in many countries."
        for firm, name, trade in zip(firms, names, trades, strict=True)
    ]
    questions = tuple(
        Question(f"In which town was the founder of {firm} born?", (town,), (index, len(people) + index))
        for index, (firm, town) in enumerate(zip(firms, towns, strict=True))
    )
    return QuestionSet(questions, tuple(people + companies))


def _pairs(rng: random.Random, words: list[str], count: int) -> list[tuple[str, str]]:
    """`count` different pairs of words."""
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < count:
        pairs[rng.choice(words), rng.choice(words)] = None
    return list(pairs)
