"""
What scripts share, and no reader of the paper must open, in the order in which data flows.

Text becomes tokens
    documents.py           Find the files of an input, and read their documents one by one.
    tokenizers.py          Turn text into ids and back: by bytes, gpt2 or SentencePiece.
    prepare.py             Divide documents among splits, and write shards of their tokens.
    data.py                Read shards as sequences, and say which of them each batch holds.
A model gets faster functions
    hardware.py            Find the device, know its peak speed, and compile a model for it.
    attention.py           Attend in ways that keep few scores in memory.
    triton_attention.py    Attend on a GPU by kernels that keep no scores at all.
    trial.py               Try a faster function beside the lines of model.py that it replaces.
    probe.py               Tell by a few numbers whether a model.py computes what it did.
    loss.py                Compute the loss in parts, try it, and measure losses.
    fast.py                Choose among these functions, and plug them into a model.
    flops.py               Count the FLOPs that a token of training takes.
It is trained
    optim.py               Train the blocks' matrices with Muon, and all else with AdamW.
    process.py             Survive a console that goes away, and note signals that ask to stop.
    files.py               Write files completely or not at all; JSON, tables and pictures.
    runs.py                Keep a run's options, checkpoints and log in its folder.
It is used
    decode.py              Keep keys and values of past tokens while a model generates.
    sampling.py            Continue a prompt: encode it, generate ids, and decode them.
    hub.py                 Write a model as a folder that transformers loads, and read one as a run.
    hub_tokenizer.py       Give such a folder its tokenizer and its README.md.
    page.py                Write a model as one HTML file: page.html with weights in it.
    modeling_nanocem.py    Be the model's class in such a folder.
"""
