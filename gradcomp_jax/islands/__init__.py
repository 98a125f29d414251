"""Programs that train alone and exchange outer gradients over an object store."""
