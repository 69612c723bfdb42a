//! Layout of a new file.
use weir_proto::map::{ClusterMap, Layout, Scheme};
use weir_proto::{Error, PgId, Result};

/// The layout by the settings: over all groups of the scheme, beginning at one that `seed` selects. Pools are
/// used in the order of their names.
pub fn layout_for_new_file(map: &ClusterMap, seed: u32) -> Result<Layout> {
    layout_in(map, None, None, seed)
}

/// Like [`layout_for_new_file`], for a given scheme and pool.
pub fn layout_in(map: &ClusterMap, scheme: Option<Scheme>, pool: Option<&str>, seed: u32) -> Result<Layout> {
    let scheme = scheme.unwrap_or(map.settings.scheme);
    let mut pools: Vec<&str> = map.groups.iter().map(|g| g.pool.as_str()).collect();
    pools.retain(|p| pool.is_none_or(|pool| *p == pool));
    pools.sort_unstable();
    pools.dedup();
    let (first_pg, pg_count) =
        pools.iter().find_map(|pool| map.groups_of(pool, scheme)).ok_or_else(|| {
            Error::unavailable(format!(
                "no placement group of scheme {scheme} yet: it needs {} targets in one pool, {} have joined",
                scheme.width(),
                map.targets.len()
            ))
        })?;
    let (first_pg, pg_count) = around_full(map, first_pg, pg_count);
    Ok(Layout { scheme, cell_shift: map.settings.cell_shift, first_pg, pg_count, seed })
}

/// The longest run of groups without a full target; all of them if there is none.
fn around_full(map: &ClusterMap, first: PgId, count: u32) -> (PgId, u32) {
    if map.full.is_empty() {
        return (first, count);
    }
    let (mut longest, mut run) = ((first, 0), (first, 0));
    for group in map.groups.iter().skip(first.0 as usize).take(count as usize) {
        run = match group.members.iter().any(|m| map.full.contains(&m.target)) {
            true => (PgId(group.id.0 + 1), 0),
            false => (run.0, run.1 + 1),
        };
        longest = if run.1 > longest.1 { run } else { longest };
    }
    if longest.1 > 0 { longest } else { (first, count) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::group_tests::{cluster, create_groups};
    use weir_proto::TargetId;

    #[test]
    fn new_files_go_around_full_targets() {
        let mut map = cluster(8, "ec:4+2");
        assert!(create_groups(&mut map, 8));
        let all = layout_for_new_file(&map, 7).unwrap();
        assert_eq!((all.first_pg, all.pg_count), (PgId(0), 32));
        map.full = vec![TargetId(3)];
        let around = layout_for_new_file(&map, 7).unwrap();
        let range = (around.first_pg.0..around.first_pg.0 + around.pg_count).map(|g| &map.groups[g as usize]);
        assert!(range.clone().count() > 0 && around.pg_count < 32);
        assert!(range.flat_map(|g| &g.members).all(|m| m.target != TargetId(3)));
        map.full = (1..=8).map(TargetId).collect();
        assert_eq!(layout_for_new_file(&map, 7), Ok(all), "each group has a full target");
    }
}
