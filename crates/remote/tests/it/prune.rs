//! Prunes: what stays, what goes, and in which order.

use ubtrfs_remote::{KeepRules, StoreWork};

use super::*;

fn last(count: u32) -> KeepRules {
    KeepRules { last: count, ..KeepRules::default() }
}

#[test]
fn a_prune_removes_snapshots_and_their_parts_but_no_parent_of_a_kept_one() {
    let bed = Bed::encrypted();
    bed.push(1, None, &stream(1, 30_000)).unwrap();
    bed.push(2, Some(1), &stream(2, 30_000)).unwrap();
    bed.push(3, None, &stream(3, 30_000)).unwrap();
    bed.push(4, Some(3), &stream(4, 30_000)).unwrap();
    // A push that did not end.
    bed.inner.set(Faults { puts_left: Some(2), ..no_faults() });
    bed.push(5, None, &stream(5, 30_000)).unwrap_err();
    bed.inner.set(no_faults());
    let plan = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap();
    let stays: Vec<_> = plan.decisions.iter().map(|it| (it.manifest.key, it.stays(), it.needed_by)).collect();
    let expected = [(4, true, None), (3, true, Some(key(4))), (2, false, None), (1, false, None)];
    assert_eq!(stays, expected.map(|(nr, stays, by)| (key(nr), stays, by)));
    assert!(plan.orphans.is_empty(), "they are young");
    bed.store.prune(&plan, &bed.keys).unwrap();
    assert_eq!(bed.store.snapshots().unwrap().len(), 2);
    assert_eq!(bed.inner.paths("/parts/").len(), 6 + 2);
    for nr in [3, 4] {
        assert_eq!(bed.pull(nr).unwrap(), stream(u64::try_from(nr).unwrap(), 30_000));
    }
    let plan = bed.store.plan_prune(&bed.keys, &last(1), i64::MAX).unwrap();
    assert_eq!(plan.orphans.len(), 2);
    bed.store.prune(&plan, &bed.keys).unwrap();
    assert_eq!(bed.inner.paths("/parts/").len(), 6);
    assert_eq!(bed.inner.paths("").len(), 8);
}

#[test]
fn a_prune_that_cannot_read_everything_removes_nothing() {
    let bed = Bed::plain();
    bed.push(1, None, &stream(1, 100)).unwrap();
    bed.push(2, None, &stream(2, 100)).unwrap();
    let manifests = bed.inner.paths("/snapshots/");
    bed.inner.write(&manifests[1], b"{}".to_vec());
    let error = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap_err().to_string();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn a_snapshot_that_is_pushed_meanwhile_stops_a_prune() {
    let bed = Bed::plain();
    bed.push(1, None, &stream(1, 100)).unwrap();
    bed.push(2, None, &stream(2, 100)).unwrap();
    let plan = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap();
    bed.push(3, Some(1), &stream(3, 100)).unwrap();
    let error = bed.store.prune(&plan, &bed.keys).unwrap_err().to_string();
    assert!(error.contains("meanwhile"), "{error}");
    assert_eq!(bed.store.snapshots().unwrap().len(), 3);
}

#[test]
fn pushes_work_beside_pushes_and_prunes_alone() {
    let bed = Bed::plain();
    let (one, other) = (bed.store.begin(StoreWork::Push).unwrap(), bed.store.begin(StoreWork::Push).unwrap());
    let error = bed.store.begin(StoreWork::Prune).unwrap_err();
    assert!(matches!(&error, RemoteError::Busy { object, .. } if object.starts_with("marks/push-")), "{error}");
    one.check().unwrap();
    drop((one, other));
    let prune = bed.store.begin(StoreWork::Prune).unwrap();
    for work in [StoreWork::Push, StoreWork::Prune] {
        let error = bed.store.begin(work).unwrap_err();
        assert!(matches!(&error, RemoteError::Busy { object, .. } if object.starts_with("marks/prune-")), "{error}");
    }
    drop(prune);
    bed.store.begin(StoreWork::Push).unwrap();
    assert!(bed.inner.paths("").is_empty(), "each removes its mark");
}
