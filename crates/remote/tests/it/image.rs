//! Images in stores that do not answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::path::Path;
use ubtrfs_remote::RemoteImage;

use crate::faulty_store::{Faults, FaultyStore};
use crate::{no_faults, stream};

#[test]
fn a_silent_store_is_waited_for_once_and_what_is_here_is_read_on() {
    let (store, path, limit) = (Arc::new(FaultyStore::default()), Path::from("disk.img"), Duration::from_secs(1));
    let content = stream(1, 40 << 20);
    store.write(&path, content.clone());
    let image = RemoteImage::of_store(store.clone(), path, "https://host/disk.img", limit).unwrap();
    let mut buf = vec![0; 4096];
    image.read(4096, &mut buf).unwrap();
    store.set(Faults { is_silent: true, ..no_faults() });
    let begun = Instant::now();
    for _ in 0..6 {
        let late = image.read(30 << 20, &mut buf).unwrap_err().to_string();
        assert!(late.contains("does not answer within"), "{late}");
    }
    let elapsed = begun.elapsed();
    assert!(elapsed >= limit && elapsed < 4 * limit, "{elapsed:?}");
    image.read(8192, &mut buf).unwrap();
    assert_eq!(buf[..], content[8192..12_288]);
}
