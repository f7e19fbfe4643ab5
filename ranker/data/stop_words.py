"""English stop words: words that say little about the topic of a text."""

# Pronouns, articles, auxiliaries, prepositions, conjunctions, and the parts of their contractions; no content words.
STOP_WORDS = frozenset(
    """
    a about above after again against all am an and any are aren as at be because been before being below between both
    but by can cannot could couldn d did didn do does doesn doing don down during each either few for from further had
    hadn has hasn have haven having he her here hers herself him himself his how i if in into is isn it its itself just
    ll m ma may me might mightn more most must mustn my myself needn neither no nor not now o of off on once only onto
    or other our ours ourselves out over own per re s same shall shan she should shouldn so some such t than that the
    their theirs them themselves then there these they this those through to too toward towards under until up upon us
    ve very via was wasn we were weren what when where whether which while who whom whose why will with within without
    won would wouldn y you your yours yourself yourselves
    """.split()  # noqa: SIM905 - a list literal would take a line per word
)
