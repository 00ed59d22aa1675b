"""Training: tensors, model, data, optimizer, the transactional store and the supervised job."""
