"""The processes of one `accelerate launch`: their process group, and how a failure reaches all of them."""
