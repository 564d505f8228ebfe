"""
Code that the scripts share and that readers of the paper can skip, in the order of the data flow.

Text becomes tokens
    documents.py           Find the files of an input, and read their documents one by one.
    tokenizers.py          Turn text into ids and back.
    prepare.py             Divide documents among splits, and write shards of their tokens.
    data.py                Read shards as sequences, and say which each batch holds.
A model meets a machine
    hardware.py            Find the device, count the FLOPs of training, and compile a model.
    triton_attention.py    Attend on a GPU by kernels, where they give what model.py's lines give.
    same.py                Ask by numbers: does a model compute what it should?
It is trained
    optim.py               Train the blocks' matrices with Muon, and all else with AdamW.
    process.py             Show progress, survive a console that goes away, and note signals.
    files.py               Write files completely or not at all: JSON, CSV, tables, pictures.
    runs.py                Keep a run's options, checkpoints and log in its folder.
It is used
    measure.py             Read a text or shards as sequences, and measure a model's losses there.
    sampling.py            Continue a prompt.
    hub.py                 Write a model as a folder that transformers loads, and read one as a run.
    hub_tokenizer.py       Give such a folder its tokenizer and its README.md.
    page.py                Write a model as one HTML file: page.html with weights in it.
    modeling_nanocem.py    Be the model's class in such a folder.
"""
