"""Parts: capabilities that can be taken out, one folder each. The name of a part's file or folder says its process."""
