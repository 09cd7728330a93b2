//! Content-addressed store of pages, trees and capsules.
