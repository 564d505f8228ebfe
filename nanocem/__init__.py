"""
What scripts share, and no reader of the paper must open, in the order in which data flows.

Text becomes tokens
    documents.py           Find the files of an input, and read their documents one by one.
    tokenizers.py          Turn text into ids and back: by bytes, gpt2 or SentencePiece.
    prepare.py             Divide documents among splits, and write shards of their tokens.
    data.py                Read shards as sequences, and say which of them each batch holds.
A model gets faster functions
    hardware.py            Find the device, know its peak speed, and compile a model for it.
    triton_attention.py    Attend on a GPU by kernels that keep no scores at all.
    loss.py                Compute the loss in parts, and measure losses.
    same.py                Ask whether outputs, the text of model.py and values are the same.
    fast.py                Choose what is faster than model.py's lines, and plug it into a model.
    flops.py               Count the FLOPs that a token of training takes.
It is trained
    optim.py               Train the blocks' matrices with Muon, and all else with AdamW.
    errors.py              Say in one line what a user can mend.
    process.py             Survive a console that goes away, and note signals that ask to stop.
    files.py               Write files completely or not at all, and JSON.
    report.py              Read and format what was measured: CSVs and tables.
    runs.py                Keep a run's options, checkpoints and log in its folder.
It is used
    sampling.py            Continue a prompt: encode it, generate ids, and decode them.
    hub.py                 Write a model as a folder that transformers loads, and read one as a run.
    hub_tokenizer.py       Give such a folder its tokenizer and its README.md.
    page.py                Write a model as one HTML file: page.html with weights in it.
    modeling_nanocem.py    Be the model's class in such a folder.
"""
