"""A small collection with known entities, coreference and relevance, written by rule."""

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.splits import split_queries
from ranker.probing.examples import PairSample

NAMES = ["Alice Morgan", "Peter Novak", "Maria Lopez", "John Carter", "Susan Clark", "Robert Hall"]
CITIES = ["London", "Paris", "Berlin", "Madrid", "Vienna", "Chicago"]
OBJECTS = ["violin", "telescope", "bicycle", "painting", "engine", "garden"]


def mini_collection(num_queries: int = 24) -> Collection:
    """Return queries about a person and an object. The relevant doc mentions both, other docs only one of them."""
    docs, queries, qrels, ranked = [], {}, {}, []
    for i in range(36):
        name, city, thing = NAMES[i % 6], CITIES[(i // 6) % 6], OBJECTS[(i + i // 6) % 6]
        text = f"{name} lived in {city} for {i + 2} years. There the {thing} was sold on Monday. "
        text += f"It was an old {thing}. Later {name} moved to {CITIES[i % 6]}."
        docs.append(Doc(f"d{i}", text, f"The {thing}"))
    for j in range(num_queries):
        doc = docs[(5 * j) % 36]
        name, thing = doc.text.split(" lived")[0], doc.title.removeprefix("The ")
        queries[f"q{j}"] = f"Where did {name} see the {thing}?"
        qrels[f"q{j}"] = {doc.doc_id: 1}
        order = [docs[(5 * j + 7 * k) % 36].doc_id for k in range(12)]
        ranked.append((f"q{j}", order, [float(-k) for k in range(12)]))
    return Collection("mini", MemoryDocs(docs), queries, qrels, Candidates.from_lists(ranked))


def mini_sample(num_queries: int = 24, docs_per_query: int = 4, seed: int = 0) -> PairSample:
    """Return a sample of all pairs of the small collection, split into parts by query."""
    collection = mini_collection(num_queries)
    assert collection.candidates is not None
    pairs = tuple(
        (query_id, doc_id)
        for query_id in collection.queries
        for doc_id in collection.candidates[query_id][:docs_per_query]
    )
    ids = split_queries(collection.queries, 0.2, 0.2, seed)
    named = {"train": "train", "dev": "val", "test": "test"}
    part_of = {query_id: named[part] for part, members in ids.items() for query_id in members}
    return PairSample(
        collection,
        pairs,
        1000,
        docs_per_query,
        12,
        seed,
        {query_id: part_of[query_id] for query_id in collection.queries},
    )


def mini_splits() -> Splits:
    """Return the small collection in the form in which a data source returns it."""
    collection = mini_collection()
    return Splits(None, collection, {})
