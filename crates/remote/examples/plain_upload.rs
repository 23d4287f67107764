//! Uploads a file to S3 in parts, several at once, without checksums, compression and manifests: what `ubtrfs push` is
//! compared with.
//!
//! ```console
//! $ ubtrfs send -q --compressed-data -f stream disk.img:/monday
//! $ plain_upload s3://bucket/plain stream 6
//! ```

use std::error::Error;
use std::io::Read;
use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use rustls::crypto::ring::default_provider;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, file, uploads] = &args[..] else {
        return Err("usage: plain_upload s3://BUCKET/PREFIX FILE UPLOADS".into());
    };
    let _ = default_provider().install_default();
    let store = AmazonS3Builder::from_env().with_url(url).build()?;
    let prefix = url.splitn(4, '/').nth(3).unwrap_or("plain").to_owned();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let begun = Instant::now();
    let mut input = std::fs::File::open(file)?;
    let parts = std::iter::from_fn(move || {
        let mut bytes = Vec::with_capacity(PART);
        let read = input.by_ref().take(PART as u64).read_to_end(&mut bytes);
        match read {
            Ok(0) => None,
            Ok(_) => Some(Ok(bytes)),
            Err(error) => Some(Err(error)),
        }
    });
    let total = runtime.block_on(upload(&store, &prefix, parts, uploads.parse()?))?;
    let seconds = begun.elapsed().as_secs_f64();
    #[allow(clippy::print_stdout, reason = "the result of the program")]
    {
        println!("{total} bytes in {seconds:.2} s: {:.1} MB/s", total as f64 / seconds / 1e6);
    }
    Ok(())
}

async fn upload(
    store: &impl ObjectStore,
    prefix: &str,
    parts: impl Iterator<Item = std::io::Result<Vec<u8>>>,
    uploads: usize,
) -> Result<usize, Box<dyn Error>> {
    let puts = stream::iter(parts.enumerate()).map(|(index, part)| async move {
        let bytes = part?;
        let len = bytes.len();
        store.put(&Path::from(format!("{prefix}/{index:08}")), bytes.into()).await?;
        Ok::<usize, Box<dyn Error>>(len)
    });
    puts.buffer_unordered(uploads).try_fold(0, |total, len| async move { Ok(total + len) }).await
}

const PART: usize = 16 << 20;
