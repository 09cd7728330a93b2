//! Image trees, capsule manifests, page codecs. Pure functions over bytes.
