//! Streams that go into stores and come back: whole, after failures, and from stores that lie.

use ubtrfs_remote::{RemoteError, RemoteKeys};

use super::*;

#[test]
fn streams_come_back() {
    for bed in [Bed::plain(), Bed::encrypted()] {
        for (nr, len) in [(1, 1), (2, 9_999), (3, 10_000), (4, 10_001), (5, 123_456)] {
            let stream = stream(nr as u64, len);
            let manifest = bed.push(nr, None, &stream).unwrap();
            assert_eq!(manifest.parts.len(), len.div_ceil(10_000));
            assert_eq!(bed.pull(nr).unwrap(), stream);
        }
        let manifest = bed.manifest(5).unwrap();
        let report = bed.store.verify_snapshot(&Arc::new(manifest), &bed.keys, 4, false, &|_| {}, &|| false).unwrap();
        assert_eq!((report.nr_good, report.problems.len(), report.stream_bytes), (13, 0, 123_456));
        assert!(matches!(bed.push(9, None, b""), Err(RemoteError::Stream { .. })), "an empty stream is no snapshot");
    }
}

#[test]
fn requests_that_fail_and_bytes_that_change_on_the_way_do_no_harm() {
    for bed in [Bed::plain(), Bed::encrypted()] {
        bed.inner.set(Faults { failing_percent: 10, corrupting_percent: 10, ..no_faults() });
        for nr in 1..=5 {
            let stream = stream(nr as u64, 150_000);
            bed.push(nr, None, &stream).unwrap();
            assert_eq!(bed.pull(nr).unwrap(), stream);
        }
    }
}

#[test]
fn a_push_that_died_leaves_no_snapshot_and_is_continued() {
    for bed in [Bed::plain(), Bed::encrypted()] {
        let stream = stream(1, 200_000);
        let mut uploaded = 0;
        for left in [3, 1, 7, 2] {
            bed.inner.set(Faults { puts_left: Some(left), ..no_faults() });
            assert!(bed.push(1, None, &stream).is_err());
            assert!(bed.store.snapshots().unwrap().is_empty());
            // The push ends at the first failure, which may come before an upload that runs beside it has its turn.
            let there = bed.inner.paths("/parts/").len();
            assert!((uploaded..=uploaded + left).contains(&there), "{uploaded} parts, {left} more, {there} there");
            uploaded = there;
        }
        bed.inner.set(no_faults());
        let pushed = bed.push_parts(key(1), &stream).unwrap();
        assert_eq!((pushed.nr_resumed, bed.inner.nr_puts()), (uploaded, 20 - uploaded));
        bed.push(1, None, &stream).unwrap();
        assert_eq!(bed.pull(1).unwrap(), stream);
        // Another stream of the same snapshot uses none of the parts.
        let other = super::stream(2, 200_000);
        assert_eq!(bed.push_parts(key(1), &other).unwrap().nr_resumed, 0);
        assert_eq!(bed.pull(1).unwrap(), stream);
    }
}

#[test]
fn parts_that_lie_are_found_and_named() {
    for bed in [Bed::plain(), Bed::encrypted()] {
        bed.push(1, None, &stream(1, 60_000)).unwrap();
        bed.push(2, None, &stream(2, 60_000)).unwrap();
        let (ones, others) = (bed.inner.paths(&key(1).to_string()), bed.inner.paths(&key(2).to_string()));
        let parts: Vec<_> = ones.iter().filter(|path| path.as_ref().contains("/parts/")).cloned().collect();
        let strangers: Vec<_> = others.iter().filter(|path| path.as_ref().contains("/parts/")).cloned().collect();
        assert_eq!((parts.len(), strangers.len()), (6, 6));
        let good = bed.inner.read(&parts[2]);
        let mut flipped = good.clone();
        flipped[17] ^= 1;
        let cases = [
            ("changed", flipped, "SHA-256"),
            ("cut", good[..good.len() - 1].to_vec(), "bytes instead of"),
            ("longer", [&good[..], b"x"].concat(), "more than"),
            ("empty", Vec::new(), "0 bytes"),
            ("of another place", bed.inner.read(&parts[4]), "part 4 in place of part 2"),
            ("of another snapshot", bed.inner.read(&strangers[2]), ""),
        ];
        for (what, bytes, words) in cases {
            bed.inner.write(&parts[2], bytes);
            let error = bed.pull(1).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, RemoteError::Damaged { .. }), "{what}: {text}");
            let sizes_differ = text.contains("more than") || text.contains("bytes instead of");
            assert!(text.contains(words) || sizes_differ, "{what}: {text}");
            assert!(text.contains("00000002-"), "{what}: it names the part: {text}");
            let manifest = Arc::new(bed.manifest(1).unwrap());
            let report = bed.store.verify_snapshot(&manifest, &bed.keys, 4, false, &|_| {}, &|| false).unwrap();
            assert_eq!((report.nr_good, report.problems.len()), (5, 1), "{what}");
        }
        bed.inner.remove(&parts[2]);
        assert!(bed.pull(1).unwrap_err().is_missing());
        let manifest = Arc::new(bed.manifest(1).unwrap());
        let report = bed.store.verify_snapshot(&manifest, &bed.keys, 4, true, &|_| {}, &|| false).unwrap();
        assert_eq!((report.nr_good, report.problems.len()), (5, 1), "a quick look finds a missing part");
        bed.inner.write(&parts[2], good);
        assert_eq!(bed.pull(1).unwrap(), stream(1, 60_000));
    }
}

#[test]
fn the_receiver_gets_only_the_verified_beginning() {
    let bed = Bed::plain();
    let stream = stream(1, 60_000);
    bed.push(1, None, &stream).unwrap();
    let parts = bed.inner.paths("/parts/");
    bed.inner.write(&parts[3], b"x".to_vec());
    let (manifest, mut out) = (Arc::new(bed.manifest(1).unwrap()), Vec::new());
    bed.store.pull_stream(&manifest, &bed.keys, 4, &mut out, &|| false).unwrap_err();
    assert_eq!(out, stream[..30_000]);
}

#[test]
fn manifests_that_lie_are_refused() {
    for bed in [Bed::plain(), Bed::encrypted()] {
        bed.push(1, None, &stream(1, 60_000)).unwrap();
        bed.push(2, None, &stream(2, 60_000)).unwrap();
        let manifests = bed.inner.paths("/snapshots/");
        assert_eq!(manifests.len(), 2);
        // One that another key has.
        bed.inner.swap(&manifests[0], &manifests[1]);
        let error = bed.manifest(1).unwrap_err().to_string();
        assert!(error.contains("another snapshot"), "{error}");
        bed.inner.swap(&manifests[0], &manifests[0]);
        // Each changed byte.
        let good = bed.inner.read(&manifests[0]);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            bed.inner.write(&manifests[0], bad);
            assert!(bed.manifest(1).is_err(), "byte {at} of {}", good.len());
        }
        for len in [0, 1, good.len() / 2, good.len() - 1] {
            bed.inner.write(&manifests[0], good[..len].to_vec());
            let decoded = bed.manifest(1);
            // A manifest in the clear may lack its last line break.
            assert!(decoded.is_err() || len == good.len() - 1, "cut to {len} bytes");
        }
        bed.inner.write(&manifests[0], good);
        bed.manifest(1).unwrap();
    }
}

#[test]
fn nobody_without_the_identity_forges_a_manifest() {
    let bed = Bed::encrypted();
    bed.push(1, None, &stream(1, 60_000)).unwrap();
    // Somebody who knows the recipient encrypts a manifest for it.
    let identity = age::x25519::Identity::generate();
    let public = identity.to_public().to_string();
    let sender = Bed {
        inner: bed.inner.clone(),
        store: RemoteStore::with_store(bed.inner.clone(), Path::from("some/prefix"), Duration::from_millis(1)).unwrap(),
        keys: Arc::new(RemoteKeys::from_files::<&str>(&[], &[], &[public]).unwrap()),
    };
    sender.push(3, None, &stream(3, 20_000)).unwrap();
    use age::secrecy::ExposeSecret;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), identity.to_string().expose_secret()).unwrap();
    let owner = RemoteKeys::from_files(&[file.path()], &[], &[]).unwrap();
    let found = bed.store.snapshots().unwrap();
    let forged = found.iter().find(|found| found.key == key(3)).unwrap();
    let error = bed.store.manifest(forged, &owner).unwrap_err().to_string();
    assert!(error.contains("has no seal of your identity"), "{error}");
    let owner = Arc::new(owner.with_unsealed(true));
    let manifest = Arc::new(bed.store.manifest(forged, &owner).unwrap());
    let mut out = Vec::new();
    bed.store.pull_stream(&manifest, &owner, 4, &mut out, &|| false).unwrap();
    assert_eq!(out, stream(3, 20_000), "the user may take it nevertheless");
    // A manifest in the clear is not taken for an encrypted one.
    let plain = Bed { keys: Arc::new(RemoteKeys::none()), ..sender };
    plain.push(4, None, &stream(4, 100)).unwrap();
    let error = bed.manifest(1).unwrap_err().to_string();
    assert!(error.contains("is not encrypted"), "{error}");
}

#[test]
fn nothing_in_the_clear_is_in_an_encrypted_store() {
    let bed = Bed::encrypted();
    let secret = b"a well known secret text, again and again".repeat(1000);
    bed.push(1, None, &secret).unwrap();
    for path in bed.inner.paths("") {
        let bytes = bed.inner.read(&path);
        assert!(bytes.starts_with(b"age-encryption.org/v1\n"));
        for word in [&b"known secret"[..], b"\"parts\"", b"sha256"] {
            assert!(!bytes.windows(word.len()).any(|window| window == word));
        }
    }
}

#[test]
fn a_stop_ends_the_work() {
    let bed = Bed::plain();
    bed.push(1, None, &stream(1, 60_000)).unwrap();
    struct Endless;
    impl std::io::Read for Endless {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            std::thread::sleep(Duration::from_millis(1));
            Err(std::io::Error::other(format!("no {}", out.len())))
        }
    }
    let failed = bed.store.push_stream(&key(2), &mut Endless, &bed.keys, &options(), &|| true);
    assert!(matches!(failed, Err(RemoteError::Stream { .. })));
    assert_eq!(bed.store.snapshots().unwrap().len(), 1);
}
