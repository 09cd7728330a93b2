//! The object store of an object tier: `s3://BUCKET/PREFIX?endpoint=URL`. Calls block for at most seconds.
//!
//! A prefix belongs to one benefactor of one pool, named by the object `owner`, so that two never remove each
//! other's segments. It is read again before a segment is stored or removed. Nothing relies on conditional
//! writes, which some servers accept and ignore: the object of a segment is written once, under a number that
//! is never reused. Readers check what they read.

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
    WriteMultipart,
    aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum},
    path::Path,
};
use std::{
    fmt,
    ops::Range,
    str::FromStr,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    runtime::Handle,
};
use whimbrel_core::HostName;
use whimbrel_wire::PublicKey;

/// Time for which a call is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of one attempt: a segment over a slow line.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest object that is read at once: a segment with the longest batch behind its limit, or the index of a
/// store of 50 GiB.
const OBJECT_MAX: u64 = 256 << 20;
/// Bytes of one part of a long object.
const PART: usize = 8 << 20;
const OWNER: &str = "owner";
/// Longest object that names the owner.
const OWNER_MAX: u64 = 512;

/// Options of an object tier.
#[derive(Clone, PartialEq, Eq)]
pub struct TierOptions {
    /// Location of the object store.
    pub url: TierUrl,
    /// Bytes of full segments that stay on the disk; the oldest are uploaded first.
    pub keep_local: u64,
    /// Whether the prefix is taken over from another benefactor, which must never use it again.
    pub take_over: bool,
    /// Credentials, region and other settings by their names in the environment: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, …; names without `AWS_` are ignored.
    pub settings: Vec<(String, String)>,
}

impl fmt::Debug for TierOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the settings, because they contain secrets.
        f.debug_struct("TierOptions")
            .field("url", &self.url)
            .field("keep_here", &self.keep_local)
            .finish_non_exhaustive()
    }
}

/// Location of segments: `s3://BUCKET[/PREFIX][?endpoint=URL]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierUrl {
    bucket: String,
    prefix: String,
    endpoint: Option<String>,
}

/// Error for a text that is not the location of an object store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an object store is s3://BUCKET[/PREFIX][?endpoint=URL], this is {text:?}")]
pub struct TierUrlError {
    /// The rejected text, at most 120 characters of it.
    pub text: String,
}

impl TierUrl {
    /// Beginning of every location of an object store.
    pub const SCHEME: &'static str = "s3://";
}

impl FromStr for TierUrl {
    type Err = TierUrlError;

    fn from_str(text: &str) -> std::result::Result<Self, TierUrlError> {
        let bad = || TierUrlError { text: text.chars().take(120).collect() };
        let rest = text.strip_prefix(Self::SCHEME).ok_or_else(bad)?;
        let (place, query) = rest.split_once('?').map_or((rest, None), |(place, query)| (place, Some(query)));
        let endpoint = match query {
            None => None,
            Some(query) => Some(query.strip_prefix("endpoint=").ok_or_else(bad)?),
        };
        let is_url = |url: &str| url.starts_with("http://") || url.starts_with("https://");
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        if bucket.is_empty() || !endpoint.is_none_or(is_url) {
            return Err(bad());
        }
        let (bucket, prefix) = (bucket.to_owned(), prefix.trim_matches('/').to_owned());
        Ok(Self { bucket, prefix, endpoint: endpoint.map(str::to_owned) })
    }
}

impl fmt::Display for TierUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix)?;
        self.endpoint.iter().try_for_each(|endpoint| write!(f, "?endpoint={endpoint}"))
    }
}

/// Benefactor that a prefix belongs to: the content of the object `owner`, a line `KEY POOL NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierOwner {
    /// Key of the benefactor.
    pub key: PublicKey,
    /// Pool of its chunks; none before its first registration, stored as 0.
    pub pool: Option<u64>,
    /// Name of the benefactor, for people.
    pub name: HostName,
}

impl fmt::Display for TierOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:016x} {}", self.key, self.pool.unwrap_or(0), self.name)
    }
}

impl TierOwner {
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split_whitespace();
        let key = fields.next()?.parse().ok()?;
        let pool = u64::from_str_radix(fields.next()?, 16).ok()?;
        let name = fields.next()?.parse().ok()?;
        Some(Self { key, pool: Some(pool).filter(|pool| *pool > 0), name })
    }
}

/// Failure of the object store.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The object store failed or cannot be reached.
    #[error("the object store {place} failed to {action}")]
    Failed {
        /// Location of the object store.
        place: String,
        /// The failed operation.
        action: &'static str,
        /// Cause reported by the object store.
        source: Box<Error>,
    },
    /// The prefix belongs to another benefactor.
    #[error(
        "{place} belongs to another benefactor ({owner}); start with `--take-over` only if that one has lost its \
         disk and never returns"
    )]
    Foreign {
        /// Location of the object store.
        place: String,
        /// Key, pool and name of the owner, as far as they are known.
        owner: String,
    },
    /// The prefix has segments of another pool.
    #[error("{place} has chunks of pool {found:016x}, this benefactor belongs to pool {ours:016x}")]
    OtherPool {
        /// Location of the object store.
        place: String,
        /// Pool of the stored segments.
        found: u64,
        /// Pool of this benefactor.
        ours: u64,
    },
}

type Result<T> = std::result::Result<T, TierError>;

/// Object of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Last part of its name.
    pub name: String,
    /// When it was stored, by the clock of the server.
    pub stored: SystemTime,
}

/// A prefix of a bucket, for threads that may block.
#[derive(Debug)]
pub struct Bucket {
    store: Arc<dyn ObjectStore>,
    url: TierUrl,
    runtime: Handle,
}

impl Bucket {
    /// Creates a handle without contacting the object store.
    pub fn new(options: TierOptions, runtime: Handle) -> Result<Self> {
        let TierOptions { url, settings, .. } = options;
        let retry =
            RetryConfig { backoff: BackoffConfig::default(), max_retries: 5, retry_timeout: RETRY_TIMEOUT };
        let client =
            ClientOptions::new().with_timeout(ATTEMPT_TIMEOUT).with_connect_timeout(RETRY_TIMEOUT / 2);
        // S3 requires a region, even for servers without regions.
        let mut builder = AmazonS3Builder::new().with_region("us-east-1");
        let mut endpoint = url.endpoint.clone();
        for (name, value) in settings.into_iter().filter(|(name, _)| name.starts_with("AWS_")) {
            if matches!(name.as_str(), "AWS_ENDPOINT" | "AWS_ENDPOINT_URL") {
                endpoint.get_or_insert(value);
            } else if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                builder = builder.with_config(key, value);
            }
        }
        builder =
            builder.with_bucket_name(&url.bucket).with_checksum_algorithm(Checksum::SHA256).with_retry(retry);
        // An address with http:// asks for it.
        let plain = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let built = builder.with_client_options(client.with_allow_http(plain)).build();
        let store = built.map_err(|source| failed(&url, "accept the settings")(source))?;
        Ok(Self { store: Arc::new(store), url, runtime })
    }

    /// Path of an object; names may have several parts.
    fn path(&self, name: &str) -> Path {
        let parts = self.url.prefix.split('/').chain(name.split('/'));
        Path::from_iter(parts.filter(|part| !part.is_empty()))
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(Error) -> TierError {
        failed(&self.url, action)
    }

    /// Stores an object, in place of one with this name. Blocks.
    pub fn put(&self, name: &str, bytes: Bytes) -> Result<()> {
        let put = self.runtime.block_on(self.store.put(&self.path(name), bytes.into()));
        put.map(drop).map_err(self.failed("store an object"))
    }

    /// Stores an object in parts, so that a slow line has time for each. It is there at the end, unless
    /// `may_end` forbids that. Blocks.
    pub fn put_parts(&self, name: &str, bytes: &[u8], may_end: impl FnOnce() -> bool) -> Result<()> {
        let path = self.path(name);
        let store = async {
            let mut upload =
                WriteMultipart::new_with_chunk_size(self.store.put_multipart(&path).await?, PART);
            for part in bytes.chunks(PART) {
                upload.wait_for_capacity(1).await?;
                upload.write(part);
            }
            upload.wait_for_capacity(0).await?;
            if may_end() {
                return upload.finish().await.map(drop);
            }
            upload.abort().await?;
            let source = "whoever stores it may not any more".into();
            Err(Error::Generic { store: "S3", source })
        };
        self.runtime.block_on(store).map_err(self.failed("store an object"))
    }

    /// Objects directly below the folder `dir`, with the time at which the server has stored each. Blocks.
    pub fn list_dir(&self, dir: &str) -> Result<Vec<ObjectEntry>> {
        let prefix = self.path(dir);
        let listed = self.runtime.block_on(self.store.list_with_delimiter(Some(&prefix)));
        let found = listed.map_err(self.failed("list its objects"))?.objects;
        let entry = |object: &ObjectMeta| {
            let stored = SystemTime::from(object.last_modified);
            Some(ObjectEntry { name: object.location.filename()?.to_owned(), stored })
        };
        Ok(found.iter().filter_map(entry).collect())
    }

    /// Bytes of an object; none if it does not exist. Blocks.
    pub fn size(&self, name: &str) -> Result<Option<u64>> {
        let head = self.runtime.block_on(self.store.head(&self.path(name)));
        Ok(absent(head).map_err(self.failed("look an object up"))?.map(|meta| meta.size))
    }

    /// Stores a file as an object, in parts.
    pub(crate) fn put_file(&self, name: &str, from: &std::path::Path) -> Result<()> {
        let path = self.path(name);
        let store = async {
            let mut file = tokio::fs::File::open(from).await.map_err(not_local)?;
            let mut upload =
                WriteMultipart::new_with_chunk_size(self.store.put_multipart(&path).await?, PART);
            loop {
                let mut part = Vec::with_capacity(PART);
                let read = (&mut file).take(PART as u64).read_to_end(&mut part).await.map_err(not_local)?;
                if read == 0 {
                    return upload.finish().await;
                }
                upload.wait_for_capacity(1).await?;
                upload.write(&part);
            }
        };
        self.runtime.block_on(store).map(drop).map_err(self.failed("store a backup"))
    }

    /// Reads an object into a file that is there; false if the object does not exist.
    pub(crate) fn get_file(&self, name: &str, to: &std::path::Path) -> Result<bool> {
        let path = self.path(name);
        let fetch = async {
            let mut object = self.store.get(&path).await?.into_stream();
            let mut file = tokio::fs::File::create(to).await.map_err(not_local)?;
            while let Some(bytes) = object.try_next().await? {
                file.write_all(&bytes).await.map_err(not_local)?;
            }
            file.flush().await.map_err(not_local)
        };
        let fetched = absent(self.runtime.block_on(fetch)).map_err(self.failed("return a backup"))?;
        Ok(fetched.is_some())
    }

    /// Names of the objects directly under the prefix.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        Ok(self.list_dir("")?.into_iter().map(|entry| entry.name).collect())
    }

    /// Location of the objects.
    pub fn place(&self) -> String {
        self.url.to_string()
    }

    /// A range of an object, or all of it; none if the object does not exist. Blocks.
    pub fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Bytes>> {
        let path = self.path(name);
        let got = self.runtime.block_on(async {
            match range {
                Some(range) => self.store.get_range(&path, range).await,
                None => {
                    let found = self.store.get(&path).await?;
                    let long = || Error::Generic {
                        store: "S3",
                        source: "the object is too long for a segment".into(),
                    };
                    if found.meta.size > OBJECT_MAX { Err(long()) } else { found.bytes().await }
                }
            }
        });
        absent(got).map_err(self.failed("return an object"))
    }

    /// Removes an object; succeeds if it does not exist.
    pub fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        let gone = self.runtime.block_on(self.store.delete(&path));
        absent(gone).map(drop).map_err(self.failed("remove an object"))
    }

    pub(super) fn list(&self) -> Result<Vec<String>> {
        let prefix = Path::from(self.url.prefix.as_str());
        let all = self.store.list(Some(&prefix)).map_ok(|object| object.location);
        let all: Vec<Path> =
            self.runtime.block_on(all.try_collect()).map_err(self.failed("list its segments"))?;
        Ok(all.iter().filter_map(|path| path.filename()).map(str::to_owned).collect())
    }

    /// Claims the prefix for `ours`, and returns it with the pool of the prefix. Fails if the prefix has
    /// another owner, unless it is taken over. `number` names the owner in the form of earlier versions.
    pub(super) fn claim(&self, ours: TierOwner, number: Option<u64>, take_over: bool) -> Result<TierOwner> {
        let place = self.url.to_string();
        let Some(text) = self.owner()? else {
            self.set_owner(&ours)?;
            return Ok(ours);
        };
        let found = TierOwner::parse(&text);
        let is_ours = match &found {
            Some(found) => found.key == ours.key,
            None => number.is_some_and(|number| text == format!("{number:016x}")),
        };
        if !is_ours && !take_over {
            return Err(TierError::Foreign { place, owner: text });
        }
        let pool = found.as_ref().and_then(|found| found.pool);
        if let (Some(found), Some(ours)) = (pool, ours.pool)
            && found != ours
        {
            return Err(TierError::OtherPool { place, found, ours });
        }
        let claimed = TierOwner { pool: pool.or(ours.pool), ..ours };
        if found.as_ref() != Some(&claimed) {
            self.set_owner(&claimed)?;
        }
        Ok(claimed)
    }

    /// Fails unless the prefix still belongs to the benefactor with this key.
    pub(super) fn check_owner(&self, ours: &PublicKey) -> Result<()> {
        let owner = self.owner()?.unwrap_or_default();
        match TierOwner::parse(&owner) {
            Some(found) if found.key == *ours => Ok(()),
            _ => Err(TierError::Foreign { place: self.url.to_string(), owner }),
        }
    }

    pub(super) fn set_owner(&self, owner: &TierOwner) -> Result<()> {
        self.put(OWNER, format!("{owner}\n").into())
    }

    /// The line of the object `owner`, as text for people if it is none.
    fn owner(&self) -> Result<Option<String>> {
        let path = self.path(OWNER);
        let read = self.runtime.block_on(async {
            let found = self.store.get(&path).await?;
            if found.meta.size > OWNER_MAX { Ok(Bytes::new()) } else { found.bytes().await }
        });
        let bytes = absent(read).map_err(self.failed("return its owner"))?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }
}

fn failed(url: &TierUrl, action: &'static str) -> impl FnOnce(Error) -> TierError {
    let place = url.to_string();
    move |source| TierError::Failed { place, action, source: Box::new(source) }
}

fn not_local(source: std::io::Error) -> Error {
    Error::Generic { store: "local file", source: Box::new(source) }
}

fn absent<T>(got: std::result::Result<T, Error>) -> std::result::Result<Option<T>, Error> {
    match got {
        Err(Error::NotFound { .. }) => Ok(None),
        got => got.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back_and_half_of_one_is_refused() {
        for text in ["s3://b/", "s3://b/a/c", "s3://b/a?endpoint=http://[::1]:9000"] {
            let url: TierUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), text);
        }
        for bad in ["", "s3://", "s3:///x", "http://b/x", "s3://b?endpoint=b:1", "s3://b?region=x"] {
            assert!(bad.parse::<TierUrl>().is_err(), "{bad}");
        }
    }
}
