//! Capsule stream: a capsule as one self-contained stream for a file, a pipe or another store.
//!
//! ```text
//! "WHCAPS" 0 1, id of the capsule (32 bytes), then records: 1 and a plain frame, …, 0
//! ```
//!
//! The manifest comes last. Nothing in a stream is trusted: the length of a frame is bounded before it is
//! read, objects are stored under digests computed here, and the capsule is committed only if it is complete
//! and has the stated id.

use crate::{
    capsule_writer::CapsuleWriter,
    error::{Result, StoreError},
    store::Store,
};
use std::{
    collections::HashSet,
    io::{Read, Write},
};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, RefName};
use whimbrel_image::{
    Manifest,
    pack_frame::{Encoder, HEAD, Kind, PackFrame, PackFrameHeader},
    tree::{Visit, walk},
};

const MAGIC: [u8; 8] = *b"WHCAPS\x00\x01";
/// zstd level of a stream, which is written once and may cross a slow link.
const LEVEL: i32 = 3;
const PAGES: usize = 64;
const NODES: usize = 8;

struct Exporter<'a, W> {
    store: &'a Store,
    out: W,
    encoder: Encoder,
    sent: HashSet<Digest>,
    written: u64,
}

impl Store {
    /// Writes a complete capsule to `out`; returns the number of bytes.
    pub fn export(&self, id: &CapsuleId, out: impl Write) -> Result<u64> {
        let manifest = self.manifest(id)?;
        let mut exporter =
            Exporter { store: self, out, encoder: Encoder::new(LEVEL), sent: HashSet::new(), written: 0 };
        exporter.write(&MAGIC)?;
        exporter.write(&id.0.0)?;
        for blob in manifest.blobs() {
            exporter.objects(Kind::Blob, &[blob])?;
        }
        for image in &manifest.images {
            exporter.image(image.root, image.pages)?;
        }
        exporter.objects(Kind::Manifest, &[id.0])?;
        exporter.write(&[0])?;
        exporter.out.flush().map_err(|source| StoreError::StreamIo { action: "write", source })?;
        Ok(exporter.written)
    }

    /// Reads a capsule from `input`, checks all of it and commits it under `refs`.
    pub fn import(&self, mut input: impl Read, refs: &[RefName]) -> Result<CapsuleId> {
        let mut head = [0; 40];
        read(&mut input, &mut head)?;
        if head[..8] != MAGIC {
            return Err(StoreError::Stream { reason: "wrong magic number" });
        }
        let mut id = [0; 32];
        id.copy_from_slice(&head[8..]);
        let writer = self.writer()?;
        let manifest = loop {
            match read_frame(&mut input)? {
                Some(bytes) => {
                    if let Some(manifest) = import_frame(&writer, &bytes, &CapsuleId(Digest(id)))? {
                        break manifest;
                    }
                }
                None => return Err(StoreError::Stream { reason: "no manifest" }),
            }
        };
        match read_frame(&mut input)? {
            None => writer.commit(&manifest, refs),
            Some(_) => Err(StoreError::Stream { reason: "frames after the manifest" }),
        }
    }
}

impl<W: Write> Exporter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|source| StoreError::StreamIo { action: "write", source })
    }

    fn objects(&mut self, kind: Kind, digests: &[Digest]) -> Result<()> {
        let (mut raw, mut lengths) = (Vec::new(), Vec::new());
        for digest in digests {
            let object = self.store.inner.objects.get(digest)?;
            raw.extend_from_slice(object.bytes());
            lengths.push(object.bytes().len());
        }
        if lengths.is_empty() {
            return Ok(());
        }
        let frame =
            self.encoder.encode(kind, &raw, &lengths).map_err(|source| StoreError::Encode { source })?;
        self.write(&[1])?;
        self.write(&frame)
    }

    fn image(&mut self, root: Option<Digest>, pages: u64) -> Result<()> {
        let store = self.store;
        let (mut some_pages, mut nodes) = (Vec::with_capacity(PAGES), Vec::with_capacity(NODES));
        walk(&store.inner.objects, root, pages, &mut |visit| {
            let (kind, list, limit, digest) = match visit {
                Visit::Page { digest, .. } => (Kind::Pages, &mut some_pages, PAGES, digest),
                Visit::Node { digest, .. } => (Kind::Nodes, &mut nodes, NODES, digest),
            };
            if !self.sent.insert(digest) {
                return Ok(false);
            }
            list.push(digest);
            if list.len() == limit {
                self.objects(kind, &std::mem::take(list))?;
            }
            Ok(true)
        })?;
        self.objects(Kind::Pages, &some_pages)?;
        self.objects(Kind::Nodes, &nodes)
    }
}

fn read(input: &mut impl Read, out: &mut [u8]) -> Result<()> {
    input.read_exact(out).map_err(|source| StoreError::StreamIo { action: "read", source })
}

/// Reads the next frame; none at the end mark.
fn read_frame(input: &mut impl Read) -> Result<Option<Vec<u8>>> {
    let mut tag = [0];
    read(input, &mut tag)?;
    match tag {
        [0] => return Ok(None),
        [1] => {}
        _ => return Err(StoreError::Stream { reason: "an unknown record" }),
    }
    let mut bytes = vec![0; HEAD];
    read(input, &mut bytes)?;
    let total = PackFrameHeader::parse(&bytes)
        .map_err(|_| StoreError::Stream { reason: "a malformed frame" })?
        .total();
    // Grows with the bytes that arrive, so a header that promises 256 MiB costs nothing by itself.
    let rest = input.take((total - HEAD) as u64).read_to_end(&mut bytes);
    rest.map_err(|source| StoreError::StreamIo { action: "read", source })?;
    Ok(Some(bytes))
}

/// Stores the objects of a frame; returns the manifest if the frame has it.
fn import_frame(writer: &CapsuleWriter, bytes: &[u8], id: &CapsuleId) -> Result<Option<Manifest>> {
    let malformed = |_| StoreError::Stream { reason: "a malformed frame" };
    let frame = PackFrame::parse(bytes).map_err(malformed)?;
    if frame.head.depth > 0 {
        return Err(StoreError::Stream { reason: "a delta" });
    }
    let raw = frame.decode(&[]).map_err(malformed)?;
    let objects: Vec<&[u8]> = frame.ranges().into_iter().map(|range| &raw[range]).collect();
    if frame.head.kind != Kind::Manifest {
        let group = if frame.head.kind == Kind::Pages { 16 } else { NODES };
        if frame.head.kind == Kind::Pages && objects.iter().any(|object| object.len() != PAGE_SIZE) {
            return Err(StoreError::Stream { reason: "a page of another length" });
        }
        return writer.put_objects(frame.head.kind, &objects, group).map(|()| None);
    }
    let manifest = Manifest::decode(&raw)?;
    match CapsuleId(Digest::of(&raw)) == *id {
        true => Ok(Some(manifest)),
        false => Err(StoreError::Stream { reason: "the manifest has another id" }),
    }
}
