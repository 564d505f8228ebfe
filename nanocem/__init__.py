"""
What several scripts share: a sentence for each file, in the order in which data flows.

    hub.py              writes a model as a folder that transformers loads, and reads one as a run
    hub_tokenizer.py    gives such a folder its tokenizer and its README.md
"""
