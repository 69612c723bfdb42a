//! Layouts of new files, for a leader.
use super::*;

/// Layouts that are remembered: one for each policy of volumes.
const POLICIES_MAX: usize = 64;

/// Results computed for one version of the map.
#[derive(Default)]
struct KnownLayouts {
    version: u64,
    layouts: Vec<(Policy, LayoutPolicy)>,
    /// Policies whose placement groups were requested from the coordinator.
    asked: Vec<Policy>,
}

/// The layout of new files: computed once for each map and policy, as every create needs it. A missing set of
/// placement groups for a volume's scheme is requested: its files can be written as soon as the map has them.
pub(super) fn layout_policy(env: Env, cluster: Cluster) -> impl Fn(&Policy) -> Option<LayoutPolicy> {
    let known: Mutex<KnownLayouts> = Mutex::default();
    move |policy| {
        let map = cluster.map();
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.version != map.version || known.layouts.len() > POLICIES_MAX {
            *known = KnownLayouts { version: map.version, ..KnownLayouts::default() };
        }
        if let Some((_, layout)) = known.layouts.iter().find(|(of, _)| of == policy) {
            return Some(*layout);
        }
        let Ok(layout) = weir_coord::layout_in(&map, policy.scheme, policy.pool.as_deref(), 0) else {
            let is_new = known.asked.len() < POLICIES_MAX && !known.asked.contains(policy);
            if let (true, Some(scheme)) = (is_new, policy.scheme.filter(|s| *s != map.settings.scheme)) {
                known.asked.push(policy.clone());
                ask_for_groups(&env, cluster.clone(), policy.pool.clone(), scheme);
            }
            return None;
        };
        let layout = LayoutPolicy {
            scheme: layout.scheme,
            cell_shift: layout.cell_shift,
            first_pg: layout.first_pg,
            pg_count: layout.pg_count,
        };
        known.layouts.push((policy.clone(), layout));
        Some(layout)
    }
}

/// Groups of the scheme for new files are made automatically.
fn ask_for_groups(env: &Env, cluster: Cluster, pool: Option<String>, scheme: Scheme) {
    env.tasks.spawn("ask for placement groups", async move {
        if let Err(e) = cluster.make_groups(pool, scheme).await {
            tracing::warn!("a volume's files cannot be written yet: {e}");
        }
    });
}
